"""Lightning's Fabric with strategy="zshard" trains as with its own strategy="ddp".

As in test_lightning.py, the same loop runs with both strategies, and its losses, weights and
optimizer states are compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="needs lightning: make test-trainers")

from lightning.fabric import Fabric, seed_everything
from lightning_runs import DIM, Block, data, on_ranks
from test_lightning import equal
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


def train(world: int, strategy: Any, options: dict[str, Any]) -> Any:
    """Return losses, weights and optimizer state of eight batches, in windows of three; options:
    precision, together (set up the optimizer with the module), clip, save, load, meta."""
    seed_everything(3, verbose=False)
    if isinstance(strategy, dict):
        strategy = ZShardFabricStrategy(**strategy)
    precision = options.get("precision", "32-true")
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, precision=precision)
    fabric.launch()
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"together": False},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"clip": {"clip_val": 0.01}},
    ],
    ids=str,
)
def test_loop_is_bit_identical_to_ddp(options: dict[str, Any]) -> None:
    assert equal(on_ranks(train, 2, "zshard", options), on_ranks(train, 2, "ddp", options))


def test_clipping_by_norm() -> None:
    options = {"clip": {"max_norm": 0.1}}
    ours, theirs = (on_ranks(train, 2, each, options) for each in ("zshard", "ddp"))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine[:2], other[:2], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the same run: DDP's, and both kinds of zshard's."""
    folder = tmp_path_factory.mktemp("fabric")
    kinds = (("ddp", "ddp"), ("full", "zshard"), ("sharded", SHARDED))
    runs = [on_ranks(train, 2, each, {"save": str(folder / name)}) for name, each in kinds]
    assert equal(runs[1], runs[0]) and equal(runs[2], runs[0])
    return folder


@pytest.mark.parametrize("kind", ["ddp", "full", "sharded"])
@pytest.mark.parametrize("world", [1, 2])
def test_checkpoints_of_any_kind_load(saved: Path, kind: str, world: int) -> None:
    theirs = on_ranks(train, world, "ddp", {"load": str(saved / "ddp")})
    ours = on_ranks(train, world, "zshard", {"load": str(saved / kind)})
    assert equal(ours, theirs)


def test_module_from_the_meta_device_loads(saved: Path) -> None:
    theirs = on_ranks(train, 2, "ddp", {"load": str(saved / "ddp")})
    options = {"load": str(saved / "sharded"), "meta": True, "together": False}
    assert equal(on_ranks(train, 2, META, options), theirs)


def test_ddp_loads_zshards_checkpoints(saved: Path) -> None:
    ours, theirs = (on_ranks(train, 2, "ddp", {"load": str(saved / k)}) for k in ("full", "ddp"))
    assert equal(ours, theirs)


def save_where_rank_0_fails(world: int, folder: str) -> list[str]:
    """Return what each save raises: of what cannot be pickled, then of what can."""
    fabric = Fabric(accelerator="cpu", devices=world, strategy=ZShardFabricStrategy(**SHARDED))
    fabric.launch()
    model: Any = fabric.setup_module(Net())
    found = []
    for more in (lambda: 0, 1) if fabric.global_rank == 0 else (0, 1):
        try:
            fabric.save(folder, {"model": model, "more": more})
            found.append("")
        except Exception as error:
            found.append(str(error))
    return found


def test_a_save_that_fails_on_rank_0_fails_on_all(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("an earlier checkpoint")
    for first, second in on_ranks(save_where_rank_0_fails, 2, str(file)):
        assert "pickle" in first and second == ""


def test_two_modules_need_full_checkpoints() -> None:
    with pytest.raises(ValueError, match="2 modules and 0 optimizers: use state_dict_type="):
        ZShardFabricStrategy(**SHARDED).save_checkpoint("x", {"a": Net(), "b": Net()})
