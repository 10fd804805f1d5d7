"""Lightning's Fabric with strategy="zshard" trains as with its own strategy="ddp".

As in test_lightning.py, the same loop runs with both strategies, and its losses, weights and
optimizer states are compared.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from scenarios import message_of
from spawn import on_ranks

pytest.importorskip("lightning", reason="needs lightning: make test-trainers")

from lightning.fabric import Fabric, seed_everything
from lightning_runs import DIM, RANKS, Block, data, run_on_ranks
from torch import Tensor, nn

import zshard
from zshard.lightning import ZShardFabricStrategy

SHARDED = {"state_dict_type": "sharded"}
META = {**SHARDED, "param_init_fn": zshard.uninitialized}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(3)])
        self.head = nn.Linear(DIM, 1)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))

    def scaled(self, x: Tensor) -> Tensor:
        return self(x).squeeze(1) * self.scale[0]


def fabric_of(strategy: Any, **options: Any) -> Fabric:
    if isinstance(strategy, dict):
        strategy = ZShardFabricStrategy(**strategy)
    world = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, **options)
    fabric.launch()
    return fabric


def train(strategy: Any, options: dict[str, Any]) -> Any:
    """Return losses, weights and optimizer state of eight batches, in windows of three; options:
    precision, together (set up the optimizer with the module), clip, save, load, meta."""
    seed_everything(3, verbose=False)
    fabric = fabric_of(strategy, precision=options.get("precision", "32-true"))
    with fabric.init_module(empty_init=options.get("meta", False)):
        model: Any = Net()
    if options.get("together", True):
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    else:
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
    model.mark_forward_method("scaled")
    state = {"model": model, "optimizer": optimizer, "step": 0, "other": {"x": 1}}
    if "load" in options:
        assert fabric.load(options["load"], state) == {}
        assert state["step"] == 3 and state["other"] == {"x": 1}
    losses = []
    for i, (x, y) in enumerate(fabric.setup_dataloaders(data())):
        if i < state["step"]:
            continue
        ends = i % 3 == 2
        with fabric.no_backward_sync(model, enabled=not ends):
            loss = (model.scaled(x) - y).square().mean()
            fabric.backward(loss)
        losses.append(loss.item())
        if ends:
            if "clip" in options:
                fabric.clip_gradients(model, optimizer, **options["clip"])
            optimizer.step()
            optimizer.zero_grad()
        if "save" in options and i == 2:
            fabric.save(options["save"], {**state, "step": i + 1})
    return losses, dict(model.state_dict()), optimizer.state_dict()["state"]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"together": False},
    {"precision": "bf16-mixed"},
    {"precision": "bf16-true"},
    {"clip": {"clip_val": 0.01}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@on_ranks(2, **RANKS)
def test_loop_is_bit_identical_to_ddp(options):
    assert_same(train("zshard", options), train("ddp", options), "the run")


@on_ranks(2, **RANKS)
def test_clipping_by_norm():
    ours, theirs = (train(each, {"clip": {"max_norm": 0.1}})[:2] for each in ("zshard", "ddp"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the same run: DDP's, and both kinds of zshard's."""
    folder = tmp_path_factory.mktemp("fabric")
    kinds = {"ddp": "ddp", "full": "zshard", "sharded": SHARDED}
    runs = [run_on_ranks(train, kind, {"save": str(folder / n)}) for n, kind in kinds.items()]
    assert_same(runs[1], runs[0], "the run with full checkpoints")
    assert_same(runs[2], runs[0], "the run with sharded checkpoints")
    return folder


@pytest.mark.parametrize("kind", ["ddp", "full", "sharded"])
@on_ranks(1, 2, **RANKS)
def test_checkpoints_of_any_kind_load(saved, kind):
    theirs = train("ddp", {"load": saved / "ddp"})
    assert_same(train("zshard", {"load": saved / kind}), theirs, "the resumed run")


@on_ranks(2, **RANKS)
def test_module_on_the_meta_device_loads_and_ddp_loads_full_checkpoints(saved):
    theirs = train("ddp", {"load": saved / "ddp"})
    assert_same(train("ddp", {"load": saved / "full"}), theirs, "DDP's run")
    options = {"load": saved / "sharded", "meta": True, "together": False}
    assert_same(train(META, options), theirs, "the resumed run")


@on_ranks(2, **RANKS)
def test_a_save_that_fails_on_rank_0_fails_on_all(tmp_path):
    fabric = fabric_of(SHARDED)
    path, model = tmp_path / "x", fabric.setup_module(Net())
    if fabric.global_rank == 0:
        path.write_text("an earlier checkpoint")
    unpickled = (lambda: 0) if fabric.global_rank == 0 else 0
    assert "pickle" in message_of(lambda: fabric.save(path, {"model": model, "more": unpickled}))
    fabric.save(path, {"model": model, "more": 1})


def test_two_modules_need_full_checkpoints() -> None:
    with pytest.raises(ValueError, match="2 modules and 0 optimizers: use state_dict_type="):
        ZShardFabricStrategy(**SHARDED).save_checkpoint("x", {"a": Net(), "b": Net()})
