"""zshard under Accelerate: the same training as with its own DDP, saved, resumed and misused.

Each test runs the real package on two ranks, once unchanged and once with
`zshard.accelerate.shard`, and compares.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from nursery import fork_ranks
from own_names import refuse
from spawn import RankPool, on_ranks, ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("accelerate", reason="needs zshard[trainers]: make test-trainers")

import accelerate
import transformers.modeling_utils
from accelerate.test_utils.training import RegressionDataset
from accelerated import Run, forget_accelerate, small_model
from micro_batches import LOW, MICRO, STRATEGY, check_sums, full_grads

import zshard
import zshard.accelerate
from zshard import FSDP

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulated": ({"gradient_accumulation_steps": 3}, {}),  # 3 does not divide the batches
    "bf16": ({"mixed_precision": "bf16"}, {}),
    "clipped": ({}, {"clip": 0.5}),
    "clipped_value": ({}, {"clip_value": 0.01}),
}


# --- training -------------------------------------------------------------------------------------


def compare(kind: str, strategy: str) -> tuple[bool, float]:
    """Return whether losses are bit-identical to DDP's, and the final difference of parameters."""
    arguments, options = KINDS[kind]
    found = []
    for each in (None, strategy):
        run = Run(each, **arguments)
        found.append((run.epoch(**options) + run.epoch(**options), run.state()))
    (losses, theirs), (ours_losses, ours) = found
    assert theirs.keys() == ours.keys()
    apart = max(float((theirs[name] - ours[name]).abs().max()) for name in theirs)
    return losses == ours_losses, apart


@pytest.mark.parametrize("strategy", ["full_shard", "zero2", "no_shard"])
@pytest.mark.parametrize("kind", KINDS)
@ranks(2)
def test_training_matches_ddp(pool: RankPool, kind: str, strategy: str) -> None:
    for same, apart in pool.run(compare, kind, strategy):
        # DDP rounds the norm for clipping differently (docs/training.md).
        assert same or kind == "clipped"
        assert apart < 1e-6 if kind == "clipped" else apart == 0


class OwnNames(nn.Module):
    """Has FSDP's names itself: one as a child, the others for what an adapter must not read."""

    def __init__(self) -> None:
        super().__init__()
        self.module = small_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


refuse(OwnNames, "module")


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_a_models_own_names_are_its_own(strategy):
    found = []
    for each in (None, strategy):
        run = Run(each, build=OwnNames, gradient_accumulation_steps=3)
        losses = run.epoch()
        losses += run.epoch()
        found.append((losses, run.state()))
        unwrapped = run.accelerator.unwrap_model(run.model)
        assert isinstance(unwrapped, OwnNames) and type(unwrapped.module) is not nn.Linear
        assert transformers.modeling_utils.unwrap_model(run.model) is unwrapped
        assert (unwrapped is run.model) is (each is not None)
    (losses, theirs), (ours_losses, ours) = found
    assert losses == ours_losses
    assert_same(ours, theirs, "the state")


def accumulated() -> list[torch.Tensor]:
    run = Run(
        STRATEGY,
        size=8 * MICRO,
        shuffle=False,
        options={"mixed_precision": LOW},
        gradient_accumulation_steps=MICRO,
    )
    for inputs, targets in run.loader:
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward(F.mse_loss(run.model(inputs).float(), targets))
    return full_grads(run.model)


@ranks(2)
def test_micro_batches_are_summed_in_float32(pool: RankPool) -> None:
    pool.run(check_sums, accumulated)


@on_ranks(2)
def test_dynamo_backend_compiles_the_sharded_model():
    losses = []
    for strategy in (None, "full_shard"):
        run = Run(strategy, size=16, dynamo_backend="eager")
        losses.append(run.epoch())
        assert run.accelerator.unwrap_model(run.model, keep_torch_compile=False) is not run.model
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) == 0.0


def uneven() -> tuple[int, int]:
    """Return how many batches this rank has within join_uneven_inputs(), and in join()."""
    forget_accelerate()
    accelerator = zshard.accelerate.shard(accelerate.Accelerator(cpu=True))
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(12, 8), torch.randn(12, 3)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert isinstance(model, FSDP)

    def learn(batches: Iterable[Any]) -> int:
        count = 0
        for inputs, targets in batches:
            optimizer.zero_grad()
            accelerator.backward(F.mse_loss(model(inputs), targets))
            optimizer.step()
            count += 1
        return count

    warned = pytest.warns(UserWarning, match=r"no effect .* FSDP\.join\(model, dataloader\)")
    with warned, accelerator.join_uneven_inputs([model], even_batches=False):
        first = learn(loader)
    loader.batch_sampler.even_batches = False
    return first, learn(model.join(loader))


@ranks(2)
def test_join_uneven_inputs_has_no_effect(pool: RankPool) -> None:
    """As under Accelerate's own ways to shard: samples are repeated, so that ranks have as many."""
    assert pool.run(uneven) == [(2, 1)] * 2


# --- misuse ---------------------------------------------------------------------------------------


def _no_shard_call() -> None:
    accelerate.Accelerator(cpu=True).prepare(FSDP(small_model()))


def _after_prepare() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(small_model())
    zshard.accelerate.shard(accelerator)


def _twice() -> None:
    zshard.accelerate.shard(zshard.accelerate.shard(accelerate.Accelerator(cpu=True)))


def _unknown_argument() -> None:
    zshard.accelerate.shard(accelerate.Accelerator(cpu=True), stratgy="full_shard")


def _not_an_accelerator() -> None:
    zshard.accelerate.shard(small_model())


def _own_fsdp() -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    try:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
        zshard.accelerate.shard(accelerate.Accelerator(cpu=True, fsdp_plugin=plugin))
    finally:
        os.environ.pop("ACCELERATE_USE_FSDP", None)


def _hook_of_ddp() -> None:
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    zshard.accelerate.shard(accelerate.Accelerator(cpu=True, kwargs_handlers=[handler]))


def _no_such_strategy() -> None:
    accelerator = zshard.accelerate.shard(accelerate.Accelerator(cpu=True), strategy="zero9")
    accelerator.prepare(small_model())


MISUSES = {
    "no call of shard()": _no_shard_call,
    "after prepare()": _after_prepare,
    "twice": _twice,
    "unknown argument": _unknown_argument,
    "not an accelerator": _not_an_accelerator,
    "its own FSDP": _own_fsdp,
    "a hook of DDP": _hook_of_ddp,
    "no such strategy": _no_such_strategy,
}
WORDS = {
    "no call of shard()": "TypeError: DistributedDataParallel cannot wrap a model that zshard has",
    "after prepare()": "RuntimeError: this Accelerator has already prepared a model: call",
    "twice": "RuntimeError: this Accelerator already shards its models",
    "unknown argument": "TypeError: zshard.accelerate.shard() takes the arguments of FSDP(), which has no",
    "not an accelerator": "TypeError: shard() expects an accelerate.Accelerator, got Sequential",
    "its own FSDP": "ValueError: this Accelerator is configured for torch's FSDP",
    "a hook of DDP": "ValueError: this Accelerator is configured for DDP's communication hook bf16",
    "no such strategy": "ValueError: ",
}


@pytest.mark.parametrize("name", MISUSES)
@on_ranks(2)
def test_misuse_names_the_remedy(name):
    forget_accelerate()
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        MISUSES[name]()
    text = f"{caught.type.__name__}: {caught.value}"
    assert text.startswith(WORDS[name])


@on_ranks(2)
def test_model_sharded_before_prepare_stays_unchanged():
    """The script calls FSDP() with its own strategy, before prepare()."""
    forget_accelerate()
    accelerator = zshard.accelerate.shard(accelerate.Accelerator(cpu=True))
    model = FSDP(small_model(), strategy="zero2")
    optimizer = torch.optim.AdamW(model.parameters())
    prepared, optimizer = accelerator.prepare(model, optimizer)
    assert prepared is model and accelerator.prepare(model) is model
    accelerator.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    assert str(zshard.shard_info(next(model.parameters())) is not None) == "True"


@on_ranks(2)
def test_frozen_layers_and_an_optimizer_prepared_first():
    """Return losses with a frozen layer, and with an optimizer that is prepared before the
    model."""
    found = []
    for strategy in (None, "full_shard"):
        forget_accelerate()
        accelerator = accelerate.Accelerator(cpu=True)
        if strategy:
            zshard.accelerate.shard(accelerator, strategy=strategy)
        model = small_model()
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        optimizer, model = accelerator.prepare(optimizer, model)
        losses = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step + 10 * accelerator.process_index)
            loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        found.append(losses)
    theirs, ours = found
    assert theirs == ours


# --- Accelerate's own tests -----------------------------------------------------------------------

OWN = ["test_script", "test_sync", "test_ops", "test_distributed_data_loop"]
ACCUMULATED = ["test_gradient_accumulation", "test_gradient_accumulation_with_opt_and_scheduler"]


def own_script(name: str, strategy: str) -> None:
    """Run a script of accelerate.test_utils with sharding in every Accelerator that it creates."""
    # test_ops does not request CPUs, and would run on one rank. No rank may exit before all have
    # connected.
    assert accelerate.PartialState(cpu=True).num_processes == 2
    torch.distributed.barrier()
    initialize = accelerate.Accelerator.__init__

    @functools.wraps(initialize)
    def sharding(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if type(self) is accelerate.Accelerator:
            zshard.accelerate.shard(self, strategy=strategy)

    accelerate.Accelerator.__init__ = sharding
    if strategy != "no_shard":  # it compares parameters and gradients with a plain model's
        torch.allclose = of_full_tensors(torch.allclose)
        torch.testing.assert_close = of_full_tensors(torch.testing.assert_close)
    module = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    # The script draws data without a seed, and compares gradients, even tiny ones, to one percent.
    RegressionDataset.__init__.__defaults__ = (2, 3, 64, 0)
    for function in filter(re.compile("test_(can_)?join").match, vars(module)):
        setattr(module, function, lambda *_: None)  # has no effect, as under Accelerate's own FSDP
    if name == "test_sync":  # its main() runs this on GPUs only
        for function in ACCUMULATED:
            for asked in range(8):
                split, dispatched, each = (bool(asked & bit) for bit in (1, 2, 4))
                getattr(module, function)(split, dispatched, each)
    module.main()


def of_full_tensors(function: Any) -> Any:
    def summoned(*args: Any, **kwargs: Any) -> Any:
        full = [zshard.full_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        return function(*full, **kwargs)

    return summoned


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
@pytest.mark.parametrize("name", OWN)
def test_accelerate_test_scripts_pass(name: str, strategy: str) -> None:
    if name == "test_distributed_data_loop":
        pytest.importorskip("torchdata", reason="Accelerate's script needs it")
    env = {"ACCELERATE_USE_CPU": "true"}
    fork_ranks(own_script, 2, name, strategy, env=env, timeout=200, check=True)


SCRIPT = """
import sys, torch, zshard.accelerate
from accelerate import Accelerator

accelerator = zshard.accelerate.shard(Accelerator(), strategy=sys.argv[1])
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
print(f"trained under {accelerator.distributed_type.value}\\n", end="")
"""


LAUNCHES = {  # `accelerate launch --cpu` starts one process, whatever --num_processes is
    "accelerate launch": (["accelerate.commands.launch", "--cpu"], "NO", 1),
    "torchrun": (["torch.distributed.run", "--standalone", "--nproc-per-node=2"], "MULTI_CPU", 2),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAUNCHES)
def test_launches(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words, kind, processes = LAUNCHES[name]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"ACCELERATE_USE_CPU": "true", "HF_HOME": str(tmp_path)}  # not the user's own settings
    done = subprocess.run(
        [sys.executable, "-m", *words, str(tmp_path / "train.py"), "zero2"],
        capture_output=True,
        text=True,
        timeout=250,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(f"trained under {kind}") == processes


def test_leftover_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"del os.environ.*TrainingArguments\(fsdp=...\)"):
        zshard.accelerate.shard(accelerate.Accelerator(cpu=True))
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    zshard.accelerate.shard(accelerate.Accelerator(cpu=True))
