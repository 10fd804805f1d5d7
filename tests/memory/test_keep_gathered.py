"""keep_gathered: units gathered in forward stay for backward, if there is memory for them.

A saved gather can be counted, and the results are those of full_shard, so each test checks the
number of gathers per step, and that losses are bit-identical.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from groups import mesh_of
from models import loss_of
from scenarios import over, unit_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, fully_shard
from zshard.memory import spare
from zshard.memory.host_limits import Resident, Room
from zshard.model import shard_model

WIDTH, UNITS = 64, 6
UNIT = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of a unit's full parameters
FORWARD = UNITS
BOTH = 2 * UNITS - 1  # gathers of a step: the last unit stays anyway


@contextlib.contextmanager
def several_hosts():
    """Context manager in which "auto" acts as between hosts; also a decorator of tests on ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_model, "crosses_hosts", lambda comm: True)
        yield


def stack(**options):
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)]
    options = {"transport": "c10d", "auto_wrap_policy": {nn.Linear}, **options}
    return FSDP(nn.Sequential(*layers), **options)


def batch(step: int) -> torch.Tensor:
    return torch.randn(
        3, WIDTH, generator=torch.Generator().manual_seed(7 * step + dist.get_rank())
    )


def go(model: Any, optimizer: Any, steps: Any = range(4)) -> tuple[list[int], list[float]]:
    """Return the gathers and the loss of each step."""
    losses = []
    with Collectives("a step") as seen:  # one profile of all: each takes a tenth of a second
        for step in steps:
            with torch.profiler.record_function("a step"):
                loss = loss_of(model(batch(step)))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return seen.gathers_of_each("a step"), losses


def counted(options: Any) -> tuple[list[int], list[float], dict[str, Any]]:
    model = stack(**options)
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)  # its state counts as long as it lives
    gathers, losses = go(model, optimizer)
    parts = {what: model.memory(what) for what in ("now", "peak", "predicted")}
    return gathers, losses, {"head": model.summary().splitlines()[0], **parts}


@functools.cache
def least_memory() -> int:
    """Return what training takes without keeping anything, in bytes; collective at first."""
    return int(counted({"keep_gathered": False})[2]["peak"]["total"])


def with_limit(extra: int) -> list[int]:
    spare_bytes = extra * 10 // 9 + 10  # a tenth of it stays free
    return counted({"memory_limit": least_memory() + spare_bytes})[0]


# --- how much is gathered -------------------------------------------------------------------------


@on_ranks(2)
@several_hosts()
def test_settings_determine_gathers_but_not_results():
    base, losses, usual = counted({"keep_gathered": False})
    assert base == [BOTH + 1, BOTH, BOTH, BOTH]  # the last unit is unknown at first
    assert "gather" not in usual["head"]
    auto = [BOTH + 1, BOTH, FORWARD, FORWARD]  # decided after the second step
    fewer = [BOTH - 1, BOTH - 2, BOTH - 2, BOTH - 2]
    for options, gathers, slots in (  # of six units; two slots existed
        ({"keep_gathered": True}, [FORWARD] * 4, 4 * UNIT),
        ({"keep_gathered": 2 * UNIT}, fewer, 2 * UNIT),
        ({"keep_gathered": "auto", "memory_limit": "1GiB"}, auto, 4 * UNIT),
        ({"memory_limit": None}, base, 0),
        ({"transport": "shm", "keep_gathered": True}, [0] * 4, None),
    ):
        seen, ours, memory = counted(options)
        assert (seen, ours) == (gathers, losses), options
        assert memory["now"]["slots"] == memory["predicted"]["slots"]
        if slots is not None:
            assert memory["now"]["slots"] - usual["now"]["slots"] == slots
        stays = "stay gathered from forward to backward" in memory["head"]
        assert stays == bool(slots)


@on_ranks(2)
@several_hosts()
def test_auto_uses_the_least_of_all_ranks():
    own = 1 if dist.get_rank() == 0 else 3
    nothing, one, three, least = [with_limit(extra * UNIT) for extra in (0, 1, 3, own)]
    assert nothing == [BOTH + 1, BOTH, BOTH, BOTH]
    assert one[2:] == least[2:] == [BOTH - 1] * 2
    assert three[2:] == [BOTH - 3] * 2


@on_ranks(4)
@several_hosts()
def test_replicas_keep_the_same_units():
    options = {"strategy": "hybrid_shard", "device_mesh": mesh_of(2, 2)}
    base, losses, usual = counted({"keep_gathered": False, **options})
    extra = 2 if dist.get_rank() == 3 else 5  # the other replica must keep as few
    limit = usual["peak"]["total"] + extra * UNIT * 10 // 9 + 10
    gathers, ours, _ = counted({"memory_limit": limit, **options})
    assert base[1:] == [BOTH] * 3 and gathers[2:] == [BOTH - 2] * 2 and ours == losses


# --- predictions and refusals ---------------------------------------------------------------------


@on_ranks(2)
@several_hosts()
def test_predictions_include_kept_units():
    for keep, units in ((True, 6), (3 * UNIT, 5), (False, 2)):
        plain = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)])
        how = {"transport": "c10d", "auto_wrap_policy": {nn.Linear}, "keep_gathered": keep}
        assert zshard.predict_memory(plain, 2, **how)["slots"] == units * UNIT
        assert stack(keep_gathered=keep).memory()["slots"] == units * UNIT
    tight = UNITS * UNIT  # for the gathered units, and for no shard
    with pytest.raises(MemoryError, match="does not fit"):
        stack(keep_gathered=True, memory_limit=tight)


WRONG = {None: TypeError, 1.5: TypeError, "all": ValueError, -1: ValueError, 0: ValueError}


@on_ranks(2)
def test_misuse_is_an_error_that_names_the_argument():
    rank = dist.get_rank()
    for value, texts in ((rank == 0, "True.*False"), ((rank + 1) * 1024, "1024 bytes.*2048 bytes")):
        words = f"differ between ranks: keep_gathered.*{texts}"
        with pytest.raises(zshard.DivergenceError, match=words):
            stack(keep_gathered=value)
    for value, kind in WRONG.items():
        with pytest.raises(kind, match=r"^keep_gathered must be "):
            stack(keep_gathered=value)


# --- when the choice is made ----------------------------------------------------------------------


def raise_first(model: Any, optimizer: Any) -> None:
    """Rank 0 raises in the middle of its first backward."""

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("planted")

    x = batch(0)
    with contextlib.suppress(KeyError, zshard.DivergenceError):
        out = model[:3](x)
        if dist.get_rank() == 0:
            out.register_hook(fail)
        loss_of(model[3:](out)).backward()
    optimizer.zero_grad()


def evaluate_first(model: Any, optimizer: Any) -> None:
    for _ in range(3):
        with torch.no_grad():
            model(batch(0))


def forward_only(model: Any, optimizer: Any) -> None:
    for _ in range(3):
        model(batch(0))


def accumulate(model: Any, optimizer: Any) -> None:
    with model.no_sync():
        for step in range(3):
            loss_of(model(batch(step))).backward()


def in_backward(model: Any, optimizer: Any) -> None:
    model.optimizer_in_backward(optimizer)


BEFORE = {
    each.__name__: each
    for each in (raise_first, evaluate_first, forward_only, accumulate, in_backward)
}


@pytest.mark.parametrize("name", BEFORE)
@on_ranks(2)
@several_hosts()
def test_nothing_is_decided_before_a_step(name):
    results = []
    for keep in (False, "auto"):
        model = stack(keep_gathered=keep)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        BEFORE[name](model, optimizer)
        assert unit_of(model[0]).engine.gathered()[0] == 0
        results.append(go(model, optimizer))
    (_, losses), (gathers, ours) = results
    assert gathers[1:] == [BOTH, FORWARD, FORWARD] and ours == losses


# --- host memory ----------------------------------------------------------------------------------


@contextlib.contextmanager
def host(room: list[int], used: list[int]) -> Iterator[None]:
    """Context manager in which the process measures these numbers, and keeps returning the last
    ones."""

    def next_of(numbers: list[int]) -> int:
        return numbers.pop(0) if len(numbers) > 1 else numbers[0]

    before = spare.rooms, spare.resident
    spare.rooms = lambda sharing: [Room(next_of(room), "")]  # type: ignore[assignment]
    spare.resident = lambda: Resident(1000, next_of(used))  # type: ignore[assignment]
    try:
        yield
    finally:
        spare.rooms, spare.resident = before


@on_ranks(2)
@several_hosts()
def test_auto_leaves_a_tenth_of_what_is_left_at_the_second_step():
    for used, gathers in (
        ([100], BOTH),
        ([96], BOTH - 3),  # of four that would fit
        ([95.5, 200], BOTH - 4),  # later steps have none, and change nothing
        ([10], FORWARD),
    ):
        with host([100 * UNIT - 1000], [int(units * UNIT) for units in used]):
            model = stack()
            seen = go(model, torch.optim.SGD(model.parameters(), 0.1), range(6))[0]
        assert seen[2:] == [gathers] * 4
    assert unit_of(model[0]).engine.gathered()[:2] == (5 * UNIT, 5 * UNIT)
    assert model.memory()["slots"] == model.memory("predicted")["slots"]


@on_ranks(2)
@several_hosts()
def test_two_models_share_the_memory():
    with host([100 * UNIT - 1000], [int(95.5 * UNIT)]):
        models = [stack(), stack()]
        steppers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        for step in range(2):
            for model, optimizer in zip(models, steppers, strict=True):
                loss_of(model(batch(step))).backward()
                optimizer.step()
        assert [unit_of(m[0]).engine.gathered()[0] for m in models] == [4 * UNIT, 0]


# --- per-unit settings ----------------------------------------------------------------------------


@on_ranks(2)
@several_hosts()
@over("c10d")
def test_per_unit_settings_take_precedence():
    for keep in (True, "auto"):
        model = stack(keep_gathered=keep)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model[0].set_reshard_after_forward(True)
        assert go(model, optimizer)[0][2:] == [FORWARD + 1] * 2
        model[1].set_reshard_after_forward(True)  # after the decision
        assert go(model, optimizer)[0][1:] == [FORWARD + 2] * 3
        model[1].set_reshard_after_forward(False)
        assert go(model, optimizer)[0][1:] == [FORWARD + 1] * 3
    for reshard, gathers in ((None, FORWARD), (True, BOTH)):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)])
        for layer in model:
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model)
        seen = go(model, torch.optim.SGD(model.parameters(), 0.1))[0]
        assert seen[2:] == [gathers] * 2


@on_ranks(2)
@several_hosts()
def test_deepcopy():
    """A copy decides independently, and one that is never trained takes nothing."""
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    go(model, optimizer)
    twin = copy.deepcopy(model)
    before = twin.memory()["slots"]
    gathers, losses = go(twin, torch.optim.SGD(twin.parameters(), 0.1))
    same = losses == go(model, optimizer)[1]
    assert before == 2 * UNIT and gathers[2:] == [FORWARD] * 2 and same
