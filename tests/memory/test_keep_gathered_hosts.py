"""keep_gathered between hosts: "auto" keeps units there, and results equal those of
keep_gathered=False, whatever a script does between forward and backward.

A script runs with and without it, and all its results must be bit-identical. A unit kept with
values from before a step or a write would change the next loss.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from groups import case_of, hosts_of
from models import CASES, loss_of, make, train
from scenarios import unit_of
from spawn import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zshard
from zshard import FSDP, full_tensor

WIDTH, UNITS = 64, 6


def batch(step: int) -> torch.Tensor:
    return torch.randn(
        3, WIDTH, generator=torch.Generator().manual_seed(7 * step + dist.get_rank())
    )


def stack(group: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(UNITS)]
    options = {"auto_wrap_policy": {nn.Linear}, **options}
    return FSDP(nn.Sequential(*layers), process_group=group, timeout=60, **options)


def kept(model: Any) -> int:
    return int(unit_of(model).engine.gathered()[0])


def numbers_of(model: Any) -> torch.Tensor:
    """Return all parameters as one tensor; collective."""
    state = model.state_dict()
    return torch.cat([value.detach().flatten() for value in state.values()])


def step_of(model: Any, optimizer: Any, step: int) -> float:
    loss = loss_of(model(batch(step)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# --- "auto" -----------------------------------------------------------------------------------------


def with_and_without(name, *sizes):
    """Compare five steps that keep units, and DDP's on two ranks, with those that keep none."""
    trainings, case = [], CASES[name]
    with hosts_of(*sizes) as group:
        for keep in (False, "auto"):
            model = case_of(group, name, keep_gathered=keep)
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            losses = train(model, case, optimizer, dist.get_rank(), steps=5)
            trainings.append((losses, numbers_of(model)))
            assert (kept(model) > 0) == ("stays gathered" in model.summary()) == bool(keep)
        assert "transport hosts" in model.summary()
    assert_same(trainings[1], trainings[0], "training with kept units")
    if len(sizes) == dist.get_world_size() == 2:
        plain = DistributedDataParallel(make(case.make))
        optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
        losses = train(plain, case, optimizer, dist.get_rank(), steps=5)
        assert_same(trainings[1], (losses, numbers_of(plain)), "training compared with DDP's")


@pytest.mark.parametrize("name", ["net", "tied"])
@on_ranks(4)
def test_auto_keeps_units_between_hosts_bit_identically(name):
    with_and_without(name, 2, 2)


@on_ranks(2)
def test_bit_identical_to_ddp():
    with_and_without("net", 1, 1)


@pytest.mark.parametrize("transport", ["c10d", "shm"])
@on_ranks(2)
def test_auto_keeps_nothing_within_one_host(transport):
    model = stack(None, transport=transport)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        step_of(model, optimizer, step)
    bytes_kept = kept(model)
    summary = model.summary()
    assert bytes_kept == 0 and "gather" not in summary


@on_ranks(2)
def test_nothing_is_kept_without_a_second_gather():
    found = []
    with hosts_of(1, 1) as group:
        for strategy in ("shard_grad_op", "no_shard", "zero1"):
            for keep in (True, "auto"):
                model = stack(group, strategy=strategy, keep_gathered=keep)
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                losses = [step_of(model, optimizer, step) for step in range(4)]
                found.append((strategy, losses, kept(model), "stays gathered" in model.summary()))
    assert [each[2:] for each in found] == [(0, False)] * 6
    assert all(each[1] == found[0][1] for each in found)


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
    """The next forward uses what is written while units stay from a forward without backward."""
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
            x = checkpoint(layer, x, use_reentrant=reentrant)  # type: ignore[no-untyped-call]
        loss = loss_of(x)
        loss.backward()
        losses.append(loss.item())
    return losses


ACTS = [summon, summon_and_write, fail_in_forward, fail_in_backward, load_after_forward]
ACTS += [accumulate, two_forwards, evaluate, stay_after_backward, recompute]


@pytest.mark.parametrize("act", ACTS)
@on_ranks(2)
def test_script_actions_stay_bit_identical(act):
    results = []
    with hosts_of(1, 1) as group:
        for keep in (False, True, "auto", 3 * 4 * WIDTH * WIDTH):
            model = stack(group, keep_gathered=keep)
            optimizer = zshard.AdamW(model.parameters(), lr=0.01)
            losses = [step_of(model, optimizer, step) for step in range(3)]
            assert (kept(model) > 0) is (keep is not False), (keep, kept(model))
            losses += act(model, optimizer)
            grads = [full_tensor(p.grad) for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            losses += [step_of(model, optimizer, step) for step in range(20, 23)]
            assert (kept(model) > 0) is (keep is not False), (keep, kept(model))
            results.append((losses, grads, numbers_of(model)))
            assert_same(results[-1], results[0], f"training with {keep}")


@on_ranks(2)
def test_step_while_units_are_gathered():
    """Units are gathered for a backward that never comes."""
    results = []
    with hosts_of(1, 1) as group:
        for keep, forward in ((False, False), (False, True), (True, True)):
            model = stack(group, keep_gathered=keep)
            optimizer = zshard.AdamW(model.parameters(), lr=0.01)
            step_of(model, optimizer, 0)
            loss_of(model(batch(1))).backward()
            if forward:
                model(batch(2))
            optimizer.step()
            results.append(numbers_of(model))
            assert_same(results[-1], results[0], "the parameters")
