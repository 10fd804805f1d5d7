"""keep_gathered between hosts: results equal those of keep_gathered=False, bit for bit, no matter
what a script does between forward and backward; also if memory runs out.

A unit kept with values from before a step or a write would change the next loss.
test_keep_gathered.py tests which units are kept, and when.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import case_of, hosts_of
from models import CASES, ddp, loss_of, make, train, wrapped
from scenarios import message_of, unit_of
from spawn import on_ranks
from test_keep_gathered import UNIT, batch, go, several_hosts, stack
from torch import nn
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP, full_tensor

BF16 = zshard.MixedPrecision(param_dtype=torch.bfloat16)


def kept(model: Any) -> int:
    return int(unit_of(model).engine.gathered()[0])


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the full weights; collective."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def between(group: Any, **options: Any) -> Any:
    """Return a stack over the transport between hosts."""
    return stack(transport="auto", process_group=group, timeout=60, **options)


def step_of(model: Any, optimizer: Any, step: int) -> float:
    loss = loss_of(model(batch(step)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# --- models of all kinds ------------------------------------------------------------------------------


def trained(model: Any, case: Any) -> Any:
    """Return the losses of five steps, and the weights after them."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return train(model, case, optimizer, dist.get_rank(), steps=5), weights(model)


@pytest.mark.parametrize("name", ["net", "tied"])
@on_ranks(2, 4)
def test_auto_keeps_units_between_hosts_bit_identically(name):
    """And on two ranks DDP's results."""
    case, two = CASES[name], dist.get_world_size() == 2
    trainings = []
    with hosts_of(*((1, 1) if two else (2, 2))) as group:
        for keep in (False, "auto"):
            model = case_of(group, name, keep_gathered=keep)
            trainings.append(trained(model, case))
            assert (kept(model) > 0) == ("stays gathered" in model.summary()) == bool(keep)
        assert "transport hosts" in model.summary()
    if two:
        plain = make(case.make)
        trainings.append((trained(ddp(plain), case)[0], weights(plain)))
    for other in trainings[1:]:
        assert_same(other, trainings[0], "training without kept units")


def case_with(name, precision, keep):
    case = CASES[name]
    options = {"auto_wrap_policy": case.policy, "mixed_precision": precision}
    return trained(wrapped(case.make, ("full_shard", "c10d"), keep_gathered=keep, **options), case)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("precision", [None, BF16], ids=["own dtype", "bf16"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "dtypes"])
@on_ranks(2, 3)
@several_hosts()
def test_kept_units_are_bit_identical(name, precision):
    usual = case_with(name, precision, False)
    for keep in (True, "auto", 600):
        assert_same(case_with(name, precision, keep), usual, f"training with {keep}")


@on_ranks(2)
def test_nothing_is_kept_within_a_host_or_without_a_second_gather():
    for transport in ("c10d", "shm"):
        model = stack(transport=transport)
        go(model, torch.optim.SGD(model.parameters(), 0.1))
        assert kept(model) == 0 and "gather" not in model.summary()
    results = []
    with hosts_of(1, 1) as group:
        for strategy in ("shard_grad_op", "no_shard", "zero1"):
            for keep in (True, "auto"):
                model = between(group, strategy=strategy, keep_gathered=keep)
                results.append(go(model, torch.optim.SGD(model.parameters(), 0.1))[1])
                assert kept(model) == 0 and "stays gathered" not in model.summary()
    assert results == results[:1] * 6


# --- script actions while units are kept --------------------------------------------------------------


class Planted(Exception):
    pass


def summon(model: Any, optimizer: Any) -> list[float]:
    loss = loss_of(model(batch(10)))
    with FSDP.summon_full_params(model, writeback=False):
        total = sum(param.double().sum().item() for param in model.parameters())
    loss.backward()
    return [loss.item(), total]


def summon_and_write(model: Any, optimizer: Any) -> list[float]:
    """The next forward uses values written while units stay from a forward without backward."""
    first = loss_of(model(batch(10))).item()
    with FSDP.summon_full_params(model), torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)
    loss = loss_of(model(batch(10)))
    loss.backward()
    assert loss.item() != first
    return [first, loss.item()]


def fail_in_forward(model: Any, optimizer: Any) -> list[float]:
    def fail(*args: Any) -> None:
        raise Planted

    hook = model[3].register_forward_pre_hook(fail)
    with contextlib.suppress(Planted):
        model(batch(10))
    hook.remove()
    return []


def fail_in_backward(model: Any, optimizer: Any) -> list[float]:
    def fail(grad: torch.Tensor) -> None:
        raise Planted

    def plant(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(fail)

    hook = model[2].register_forward_hook(plant)
    loss = loss_of(model(batch(10)))
    hook.remove()
    with contextlib.suppress(Planted):
        loss.backward()
    optimizer.zero_grad()
    return [loss.item()]


def load_after_forward(model: Any, optimizer: Any) -> list[float]:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    step_of(model, optimizer, 10)
    first = loss_of(model(batch(11))).item()
    model.load_state_dict(before)
    loss = loss_of(model(batch(11)))
    loss.backward()
    assert loss.item() != first
    return [first, loss.item()]


def accumulate(model: Any, optimizer: Any) -> list[float]:
    losses = []
    with model.no_sync():
        for step in (10, 11):
            losses.append(loss_of(model(batch(step))))
            losses[-1].backward()
    losses.append(loss_of(model(batch(12))))
    losses[-1].backward()
    return [loss.item() for loss in losses]


def two_forwards(model: Any, optimizer: Any) -> list[float]:
    losses = [loss_of(model(batch(step))) for step in (10, 11)]
    for loss in losses:
        loss.backward()
    return [loss.item() for loss in losses]


def evaluate(model: Any, optimizer: Any) -> list[float]:
    loss = loss_of(model(batch(10)))
    model.eval()
    with torch.no_grad():
        between = loss_of(model(batch(11))).item()
    model.train()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.inference_mode():
        after = loss_of(model(batch(11))).item()
    return [loss.item(), between, after]


def stay_after_backward(model: Any, optimizer: Any) -> list[float]:
    """Parameters that stay even then are gathered again once they have changed."""
    model.set_reshard_after_backward(False)
    losses = [step_of(model, optimizer, step) for step in (10, 11)]
    model.set_reshard_after_backward(True)
    return [*losses, step_of(model, optimizer, 12)]


def recompute(model: Any, optimizer: Any) -> list[float]:
    losses = []
    for reentrant in (False, True):
        x = batch(10).requires_grad_()
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=reentrant).tanh()  # type: ignore[no-untyped-call]
        loss = loss_of(x)
        loss.backward()
        losses.append(loss.item())
    return losses


def step_while_gathered(model: Any, optimizer: Any) -> list[float]:
    """Units are gathered for a backward that never comes."""
    loss_of(model(batch(10))).backward()
    return [loss_of(model(batch(11))).item()]


ACTS = [summon, summon_and_write, fail_in_forward, fail_in_backward, load_after_forward]
ACTS += [accumulate, two_forwards, evaluate, stay_after_backward, recompute, step_while_gathered]


@pytest.mark.parametrize("act", ACTS)
@on_ranks(2)
def test_script_actions_stay_bit_identical(act):
    results = []
    with hosts_of(1, 1) as group:
        for keep in (False, True, "auto", 3 * UNIT):
            model = between(group, keep_gathered=keep)
            optimizer = zshard.AdamW(model.parameters(), lr=0.01)
            losses = [step_of(model, optimizer, step) for step in range(3)]
            assert (kept(model) > 0) is (keep is not False), (keep, kept(model))
            losses += act(model, optimizer)
            grads = [full_tensor(p.grad) for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            losses += [step_of(model, optimizer, step) for step in range(20, 23)]
            assert (kept(model) > 0) is (keep is not False), (keep, kept(model))
            results.append((losses, grads, weights(model)))
            assert_same(results[-1], results[0], f"training with {keep}")


# --- checkpoints, and memory that runs out ---------------------------------------------------------------


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
