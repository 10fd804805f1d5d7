"""keep_gathered: results are bit-identical to those of units that are gathered again, also where
memory runs out.

test_keep_gathered.py has what is kept, and when.
"""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from models import CASES, loss_of, make, train, wrapped
from scenarios import message_of, unit_of
from spawn import on_ranks
from test_keep_gathered import UNITS, WIDTH, batch, go, several_hosts, stack
from torch import nn
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP

BF16 = zshard.MixedPrecision(param_dtype=torch.bfloat16)


def case_with(name, precision, keep):
    case = CASES[name]
    options = {"auto_wrap_policy": case.policy, "mixed_precision": precision}
    model = wrapped(case.make, ("full_shard", "c10d"), keep_gathered=keep, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return train(model, case, optimizer, dist.get_rank(), steps=5), model.state_dict()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("precision", [None, BF16], ids=["own dtype", "bf16"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "dtypes"])
@on_ranks(2, 3)
@several_hosts()
def test_kept_units_are_bit_identical(name, precision):
    usual = case_with(name, precision, False)
    for keep in (True, "auto", 600):
        assert_same(case_with(name, precision, keep), usual, f"training with {keep}")


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant).tanh()  # type: ignore[no-untyped-call]
        return x


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@on_ranks(2)
@several_hosts()
def test_recomputed_layers(reentrant):
    found = []
    for keep in (False, True, "auto"):
        model = FSDP(
            make(lambda: Checkpointed(reentrant)),
            transport="c10d",
            auto_wrap_policy={nn.Linear},
            keep_gathered=keep,
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for step in range(4):
            loss = loss_of(model(batch(step).requires_grad_()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with zshard.FSDP.summon_full_params(model):
            total = sum(param.double().sum().item() for param in model.parameters())
        found.append((losses, total))
    first, *others = found
    assert others == [first] * 2


@on_ranks(2)
@several_hosts()
def test_offload_and_checkpoints(tmp_path):
    """Parameters on a disk; saved while some units stay, and loaded into a model that keeps
    nothing."""
    directory = str(tmp_path)
    found = []
    for keep in (False, "auto"):
        model = stack(keep_gathered=keep, offload=directory)
        optimizer = zshard.AdamW(model.parameters(), lr=0.01)
        losses = go(model, optimizer)[1]
        zshard.save(f"{directory}/{keep}", model, optimizer)
        other = stack(keep_gathered=False)
        stepper = zshard.AdamW(other.parameters(), lr=0.01)
        zshard.load(f"{directory}/{keep}", other, stepper)
        found.append((losses, go(other, stepper)[1], go(model, optimizer)[1]))
    first, second = found
    assert first == second and first[1] == first[2]


@on_ranks(1, fresh=True)
def test_world_size_one():
    model = FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), keep_gathered=True)
    loss_of(model(torch.ones(1, 4))).backward()
    assert model.memory()["slots"] == 0


@on_ranks(2, fresh=True)
def test_a_failed_allocation_names_keep_gathered():
    """Rank 1 has no address space for the units that are to stay."""
    dist.init_process_group("gloo")
    os.environ["ZSHARD_HOST"] = f"host {dist.get_rank()}"  # within one host nothing is kept
    big = 1024
    layers = [nn.Linear(big, big, bias=False) for _ in range(12)]
    model = FSDP(nn.Sequential(*layers), transport="c10d", auto_wrap_policy={nn.Linear}, timeout=20)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    for _ in range(2):
        model(torch.ones(1, big)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert unit_of(model[0]).engine.gathered()[0] == 11 * (4 << 20)
    if dist.get_rank() == 1:
        size = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]
        resource.setrlimit(resource.RLIMIT_AS, ((size << 10) + (36 << 20), resource.RLIM_INFINITY))
    kinds = MemoryError, zshard.PeerError, zshard.DivergenceError
    text = message_of(lambda: model(torch.ones(1, big)), kinds)
    kept = "44 MiB of it are for parameters that stay gathered: pass FSDP(keep_gathered=False)"
    assert (kept if dist.get_rank() else "rank 1") in text
