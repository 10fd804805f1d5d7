"""Ranks without a process group do not silently train alone.

SLURM and MPI publish the number of processes, and so does a process group that is created after
FSDP(...); mp.spawn publishes nothing. A script that was started without torchrun prints a line.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from compare import differences
from nursery import fork_ranks
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


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


WRAPS: dict[str, Any] = {
    "FSDP": FSDP,
    "fully_shard": zshard.fully_shard,
    "ddp": zshard.DistributedDataParallel,
    "initialize": lambda made: zshard.initialize(
        model=made,
        config={"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("launcher", VARIABLES)
def test_rank_of_an_unsupported_launcher_is_an_error(
    launcher: str, wrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in VARIABLES[launcher].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="=4, but there is no process group") as error:
        WRAPS[wrap](model())
    for remedy in ("init_process_group() first", "torchrun", "configure_model()"):
        assert remedy in str(error.value)
    name = str(error.value).rpartition("unset ")[2]
    monkeypatch.delenv(name)
    for other in ("SLURM_NTASKS", "SLURM_PROCID"):
        monkeypatch.delenv(other, raising=False)
    if wrap != "initialize":  # it creates a group of one
        WRAPS[wrap](model())(torch.ones(1, 4))


@pytest.mark.parametrize("size", ["1", None])
def test_single_task_trains_alone(size: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    if size is not None:
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", size)
        monkeypatch.setenv("SLURM_NTASKS", "8")
    FSDP(model())(torch.ones(1, 4))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return the function for what was printed, in a process that has not said it yet."""
    groups._say_alone.cache_clear()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return lambda: capfd.readouterr().err


@pytest.mark.parametrize("wrap", [name for name in WRAPS if name != "initialize"])
def test_lone_process_says_so_once(wrap: str, said: Callable[[], str]) -> None:
    for _ in range(2):
        WRAPS[wrap](model())
    line = "zshard: 1 rank: nothing is sharded; to use N ranks, start with torchrun"
    assert said() == f"{line} --nproc-per-node N\n"


def test_lone_process_of_initialize_says_so(said: Callable[[], str], group_ends: None) -> None:
    WRAPS["initialize"](model())
    assert said().count("1 rank: nothing is sharded") == 1


def test_one_rank_of_torchrun_says_nothing(
    said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    WRAPS["FSDP"](model())
    assert said() == ""


def test_one_rank_of_a_group_says_nothing(said: Callable[[], str], group_ends: None) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    WRAPS["FSDP"](model())
    assert said() == ""


def group_comes_late(how: str) -> list[str]:
    """Return the errors of a model that was wrapped before init_process_group(), repeatedly; and of
    one that was wrapped after it."""
    variables = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    options = {"mixed_precision": MixedPrecision(torch.bfloat16)} if how == "mixed" else {}
    early: Any = FSDP(model(), auto_wrap_policy={nn.Linear}, **options)
    early(torch.ones(1, 4)).sum().backward()
    os.environ |= variables
    dist.init_process_group("gloo")
    found = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            early(torch.ones(1, 4))
        found.append(str(error.value))
    late: Any = FSDP(model())
    late(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
    with FSDP.summon_full_params(late, with_grads=True):
        grads = {name: param.grad.clone() for name, param in late.named_parameters()}
    plain = model()
    (sum(plain(torch.full((1, 4), float(rank))).sum() for rank in range(2)) / 2).backward()
    assert differences(grads, {name: p.grad for name, p in plain.named_parameters()}) == []
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["plain", "mixed"])
def test_late_process_group_is_an_error_in_the_first_forward(how: str) -> None:
    for result in fork_ranks(group_comes_late, 2, how, check=True):
        for text in result.value:
            assert "this Sequential preceded init_process_group()" in text
            assert "each rank would train alone" in text


def spawned(rank: int, file: str) -> None:
    made: Any = FSDP(model())
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    with pytest.raises(RuntimeError, match="before init_process_group"):
        made(torch.ones(1, 4))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.thorough
def test_under_mp_spawn(tmp_path: Path) -> None:
    mp.spawn(spawned, args=(str(tmp_path / "store"),), nprocs=2)
