"""A script's start and its end: ranks without a process group do not silently train alone, and
objects that a script still holds at its end are freed without output.

SLURM and MPI publish the number of processes, and so does a process group that is created after
FSDP(...); mp.spawn publishes nothing. A script that was started without torchrun prints a line.

At the end Python empties the modules that were imported last first: objects of the script's own
module are freed after zshard's modules have been emptied.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from compare import assert_same
from models import TRANSPORTS, loss_of, make
from nursery import fork_ranks
from rows import all_rows
from scenarios import Wide, all_grads, floats, learn
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, MixedPrecision
from zshard.ranks import groups

VARIABLES = {
    "srun": {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "8"},
    "slurm": {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
    "openmpi": {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
    "mvapich": {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4"},
    "mpich": {"PMI_RANK": "2", "PMI_SIZE": "4"},
    "no rank": {"WORLD_SIZE": "4"},
}
ALONE: list[dict[str, str]] = [
    {"SLURM_PROCID": "0"},
    {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},
]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


CONFIG = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
WRAPS: dict[str, Any] = {
    "FSDP": FSDP,
    "fully_shard": zshard.fully_shard,
    "ddp": zshard.DistributedDataParallel,
    "initialize": lambda made: zshard.initialize(model=made, config=CONFIG),
}


def test_rank_of_an_unsupported_launcher_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with all_rows() as row:
        for launcher, variables in VARIABLES.items():
            for wrap, act in WRAPS.items():
                with row(launcher, wrap), monkeypatch.context() as patch:
                    for name, value in variables.items():
                        patch.setenv(name, value)
                    with pytest.raises(RuntimeError, match="=4, but there is no process") as error:
                        act(model())
                    for remedy in ("init_process_group() first", "torchrun", "configure_model()"):
                        assert remedy in str(error.value)
                    patch.delenv(str(error.value).rpartition("unset ")[2])
                    for other in ("SLURM_NTASKS", "SLURM_PROCID"):
                        patch.delenv(other, raising=False)
                    if wrap != "initialize":  # it creates a group of one
                        act(model())(torch.ones(1, 4))


@pytest.mark.parametrize("variables", ALONE)
def test_single_task_trains_alone(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    FSDP(model())(torch.ones(1, 4))


@pytest.fixture
def printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[[], str]]:
    """Return a function for the output so far, in a process that has not printed it yet."""
    groups._say_alone.cache_clear()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield lambda: capfd.readouterr().err
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("wrap", WRAPS)
def test_lone_process_prints_it_once(wrap: str, printed: Callable[[], str]) -> None:
    for _ in range(1 if wrap == "initialize" else 2):
        WRAPS[wrap](model())
    line = "zshard: 1 rank: nothing is sharded; to use N ranks, start with torchrun"
    assert printed().count(f"{line} --nproc-per-node N\n") == 1


@pytest.mark.parametrize("how", ["torchrun", "group"])
def test_one_rank_of_a_launcher_prints_nothing(
    how: str, printed: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "torchrun":
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    FSDP(model())
    assert printed() == ""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", [None, MixedPrecision(torch.bfloat16)])
@on_ranks(2, fresh=True)
def test_late_process_group_is_an_error_in_the_first_forward(precision: Any) -> None:
    """Repeatedly; a model that is wrapped after it has the mean of the ranks' gradients."""
    variables = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    early: Any = FSDP(model(), auto_wrap_policy={nn.Linear}, mixed_precision=precision)
    early(torch.ones(1, 4)).sum().backward()
    os.environ |= variables
    dist.init_process_group("gloo")
    words = r"this Sequential preceded init_process_group\(\).*each rank would train alone"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=words):
            early(torch.ones(1, 4))
    late: Any = FSDP(model())
    late(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
    plain = model()
    (sum(plain(torch.full((1, 4), float(rank))).sum() for rank in range(2)) / 2).backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    assert_same(all_grads(late), expected, "the gradients")


def spawned(rank: int, file: str) -> None:
    groups._say_alone.cache_clear()  # pytest's process, from which it is forked, may have said it
    with pytest.warns(match=r"trains alone.*init_process_group\(\)|init_process_group\(\).*alone"):
        made: Any = FSDP(model())
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    with pytest.raises(RuntimeError, match="preceded init_process_group"):
        made(torch.ones(1, 4))
    dist.barrier()
    dist.destroy_process_group()


def test_under_mp_spawn(tmp_path: Path) -> None:
    """Here its processes are forked, which saves the import of torch."""
    context: Any = mp.start_processes(
        spawned, (str(tmp_path / "store"),), nprocs=2, join=False, start_method="fork"
    )
    while not context.join():  # one of them has ended
        pass


SETTINGS = {}  # of the models, in a rank


def trained(kind=torch.optim.AdamW, **options):
    model = FSDP(make(Wide), **SETTINGS)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    for i in range(2):
        learn(model, optimizer, i)
    return model, optimizer


def whole_model():
    return trained()[0]


def averages():
    held = trained()
    return zshard.EMA(held[0], 0.9), copy.deepcopy(held)


def cycles_and_hooks():
    model, optimizer = trained(zshard.AdamW)
    model.itself, optimizer.model = [model], model

    def hook(*_, held=(model, optimizer)):
        pass

    model.register_forward_hook(hook)
    optimizer.register_step_post_hook(hook)
    return torch.nn.modules.module.register_module_forward_hook(hook)


def steps_in_backward():
    model, optimizer = trained(zshard.AdamW)
    optimizer.zero_grad()
    handle = model.optimizer_in_backward(optimizer)
    loss_of(model(floats(0))).backward()
    return handle


def trace(folder):
    with zshard.profile(f"{folder}/trace.json") as traced:
        held = trained()
    return traced, held


def saves(folder):
    model, optimizer = trained()
    saved = zshard.save(f"{folder}/checkpoint", model, optimizer, asynchronous=True)
    return saved, zshard.export(model), list(zshard.export(model))


def engine():
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3},
    }
    made = zshard.initialize(model=make(Wide), config=config)
    made[0].backward(loss_of(made[0](floats(0))))
    made[0].step()
    return made


def finished(folder):
    """Objects that a script has used."""
    kinds = (torch.optim.AdamW, zshard.AdamW, zshard.AdamW8bit)
    held = [*map(trained, kinds), averages(), cycles_and_hooks(), loss_of(whole_model()(floats(0)))]
    return [*held, steps_in_backward(), trace(folder), saves(folder), engine()]


def left_open(folder):
    """Iterators and contexts that a script has begun."""
    iterators = [
        iter(zshard.export(whole_model(), bucket=5000)),
        zshard.whole_named_parameters(whole_model()),
        iter(whole_model().join([torch.ones(1)])),
    ]
    contexts = [
        FSDP.summon_full_params(whole_model()),
        zshard.zero.GatheredParameters(list(whole_model().parameters()), 0),
        zshard.EMA(whole_model(), 0.9).swapped(),
        whole_model().no_sync(),
    ]
    begun = [*map(next, iterators), *(context.__enter__() for context in contexts)]
    return iterators, contexts, begun


def holds(those, transport, folder):
    SETTINGS.update(transport=transport, timeout=30)
    vars(sys.modules["__main__"])["held"] = those(folder)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("those", [finished, left_open])
def test_exit_is_quiet(tmp_path, those, transport):
    for result in fork_ranks(holds, 2, those, transport, str(tmp_path)):
        assert not result.stderr and result.returncode == 0
