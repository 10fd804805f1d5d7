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
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_same
from nursery import fork_ranks
from own_names import refuse
from rows import all_rows
from scenarios import message_of
from spawn import on_ranks
from torch import nn
from torch.nn import functional as F

pytest.importorskip("accelerate", reason="needs zshard[trainers]: make test-trainers")

import accelerate
import transformers.modeling_utils
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.test_utils.training import RegressionDataset
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
)
from accelerated import Run, forget_accelerate, small_model
from micro_batches import LOW, MICRO, STRATEGY, check_sums, full_grads

import zshard
from zshard import FSDP
from zshard.accelerate import shard

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulated": ({"gradient_accumulation_steps": 3}, {}),  # 3 does not divide the batches
    "bf16": ({"mixed_precision": "bf16"}, {}),
    "clipped": ({}, {"clip": 0.5}),
    "clipped_value": ({}, {"clip_value": 0.01}),
}


# --- training -------------------------------------------------------------------------------------


def outcome(run: Run, **options: Any) -> dict[str, Any]:
    """Return the losses of two epochs, and the state."""
    return {"losses": run.epoch(**options) + run.epoch(**options), **run.state()}


@pytest.mark.parametrize("strategy", ["full_shard", "zero2", "no_shard"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_training_matches_ddp(kind, strategy):
    arguments, options = KINDS[kind]
    theirs, ours = (outcome(Run(each, **arguments), **options) for each in (None, strategy))
    if kind == "clipped":  # DDP rounds the norm differently (docs/training.md)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    else:
        assert_same(ours, theirs, "the run")


class OwnNames(nn.Module):
    """Has FSDP's names: one as a child, the others as values that an adapter must not read."""

    def __init__(self) -> None:
        super().__init__()
        self.module = small_model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


refuse(OwnNames, "module")


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_a_models_own_names_are_its_own(strategy):
    outcomes = []
    for each in (None, strategy):
        run = Run(each, build=OwnNames, gradient_accumulation_steps=3)
        outcomes.append(outcome(run))
        unwrapped = run.accelerator.unwrap_model(run.model)
        assert isinstance(unwrapped, OwnNames) and type(unwrapped.module) is not nn.Linear
        assert transformers.modeling_utils.unwrap_model(run.model) is unwrapped
        assert (unwrapped is run.model) is (each is not None)
    assert_same(outcomes[1], outcomes[0], "the run")


def accumulated() -> list[torch.Tensor]:
    options = {"mixed_precision": LOW}
    sizes = {"size": 8 * MICRO, "shuffle": False, "gradient_accumulation_steps": MICRO}
    run = Run(STRATEGY, options=options, **sizes)
    for inputs, targets in run.loader:
        with run.accelerator.accumulate(run.model):
            run.accelerator.backward(F.mse_loss(run.model(inputs).float(), targets))
    return full_grads(run.model)


@on_ranks(2)
def test_micro_batches_are_summed_in_float32():
    check_sums(accumulated)


@on_ranks(2)
def test_dynamo_backend_compiles_the_sharded_model():
    runs = [Run(strategy, size=16, dynamo_backend="eager") for strategy in (None, "full_shard")]
    for run in runs:
        assert run.accelerator.unwrap_model(run.model, keep_torch_compile=False) is not run.model
    assert runs[0].epoch() == runs[1].epoch()


@on_ranks(2)
def test_join_uneven_inputs_has_no_effect():
    """As under Accelerate's own ways to shard: samples are repeated, so that all ranks have the
    same number."""
    run = Run(size=12)
    counts = []
    warned = pytest.warns(UserWarning, match=r"no effect .* FSDP\.join\(model, dataloader\)")
    with warned, run.accelerator.join_uneven_inputs([run.model], even_batches=False):
        counts.append(len(run.epoch()))
    run.loader.batch_sampler.even_batches = False
    loader, run.loader = run.loader, []
    for inputs, targets in run.model.join(loader):
        counts.append(len(inputs))
        run.accelerator.backward(F.mse_loss(run.model(inputs), targets))
    assert counts == [4, 4]


def with_local_sgd(strategy: str | None) -> dict[str, Any]:
    run, losses = Run(strategy), []
    with LocalSGD(run.accelerator, run.model, local_sgd_steps=3) as local:
        for inputs, targets in run.loader:
            loss = F.mse_loss(run.model(inputs), targets)
            run.accelerator.backward(loss)
            run.optimizer.step()
            run.optimizer.zero_grad()
            local.step()
            losses.append(loss.item())
    return {"losses": losses, **run.state()}


@on_ranks(2)
def test_local_sgd_averages_replicas_as_under_ddp_and_no_shards():
    assert_same(with_local_sgd("no_shard"), with_local_sgd(None), "the run")
    with pytest.raises(
        zshard.ShardError, match=r"all_reduce\(\) was called on a shard.*full_tensor"
    ):
        with_local_sgd("full_shard")


# --- misuse ---------------------------------------------------------------------------------------


def after_prepare() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(small_model())
    shard(accelerator)


def its_own_fsdp() -> None:
    try:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
        shard(Accelerator(cpu=True, fsdp_plugin=plugin))
    finally:
        os.environ.pop("ACCELERATE_USE_FSDP", None)


def hook_of_ddp() -> None:
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    shard(Accelerator(cpu=True, kwargs_handlers=[handler]))


def no_such_strategy() -> None:
    shard(Accelerator(cpu=True), strategy="zero9").prepare(small_model())


WRONG: dict[str, Any] = {
    "DistributedDataParallel cannot wrap a model that zshard has": (
        lambda: Accelerator(cpu=True).prepare(FSDP(small_model()))
    ),
    "this Accelerator has a model or shards already: call": after_prepare,
    "this Accelerator has a model or shards already": lambda: shard(shard(Accelerator(cpu=True))),
    "takes the arguments of FSDP(), which has no": (
        lambda: shard(Accelerator(cpu=True), stratgy="full_shard")
    ),
    "expects an accelerate.Accelerator, got Sequential": lambda: shard(small_model()),
    "this Accelerator is configured for torch's FSDP": its_own_fsdp,
    "is configured for DDP's communication hook bf16": hook_of_ddp,
    "zero9": no_such_strategy,
}


@on_ranks(2)
def test_misuse_names_the_remedy():
    with all_rows() as row:
        for text, misuse in WRONG.items():
            forget_accelerate()
            with row(text):
                assert text in message_of(misuse, (TypeError, ValueError, RuntimeError))


@on_ranks(2)
def test_model_sharded_before_prepare_stays_unchanged():
    """The script calls FSDP() with its own strategy, before prepare()."""
    forget_accelerate()
    accelerator = shard(Accelerator(cpu=True))
    model = FSDP(small_model(), strategy="zero2")
    optimizer = torch.optim.AdamW(model.parameters())
    prepared, optimizer = accelerator.prepare(model, optimizer)
    assert prepared is model and accelerator.prepare(model) is model
    accelerator.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    assert zshard.shard_info(next(model.parameters())) is not None


@on_ranks(2)
def test_frozen_layers_and_an_optimizer_prepared_first():
    losses: dict[str | None, list[float]] = {None: [], "full_shard": []}
    for strategy, own in losses.items():
        forget_accelerate()
        accelerator = Accelerator(cpu=True)
        if strategy:
            shard(accelerator, strategy=strategy)
        model = small_model()
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        optimizer, model = accelerator.prepare(optimizer, model)
        for step in range(3):
            generator = torch.Generator().manual_seed(step + 10 * accelerator.process_index)
            loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            own.append(loss.item())
    assert losses[None] == losses["full_shard"]


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
            shard(self, strategy=strategy)

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


LAUNCHES = {  # `accelerate launch --cpu` starts one process for any --num_processes
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
    command = [sys.executable, "-m", *words, str(tmp_path / "train.py"), "zero2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(f"trained under {kind}") == processes


def test_leftover_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"del os.environ.*TrainingArguments\(fsdp=...\)"):
        shard(Accelerator(cpu=True))
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    shard(Accelerator(cpu=True))
