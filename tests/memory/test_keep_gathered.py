"""keep_gathered: units gathered in forward stay for backward, if there is memory for them.

A saved gather can be counted, and the results are those of full_shard, so each test checks the
number of gathers per step, and that losses are bit-identical.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from groups import mesh_of
from models import loss_of
from scenarios import message_of, over, unit_of
from spawn import on_ranks
from torch import nn

import zshard
from zshard import FSDP, fully_shard
from zshard.memory import spare
from zshard.memory.host_limits import Resident, Room
from zshard.model import shard_model

real_crosses_hosts = shard_model.crosses_hosts

WIDTH, UNITS = 64, 6
UNIT = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of a unit's full parameters
FORWARD = UNITS
BOTH = 2 * UNITS - 1  # gathers of a step: the last unit stays anyway


@pytest.fixture(autouse=True)
def several_hosts(request: Any) -> Iterator[None]:
    """Make "auto" act as between hosts, on all ranks of a test."""
    names = [name for name in ("pool", "pool2", "pool4") if name in request.fixturenames]
    pools = [request.getfixturevalue(name) for name in names]
    for pool in pools:
        pool.run(pretend, True)
    yield
    for pool in pools:
        pool.run(pretend, False)


def pretend(on: bool) -> None:
    shard_model.crosses_hosts = (lambda comm: True) if on else real_crosses_hosts


def stack(**options: Any) -> Any:
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


def each_setting() -> Any:
    expected = counted({"keep_gathered": False})
    found = [
        counted({"keep_gathered": True}),
        counted({"keep_gathered": 2 * UNIT}),
        counted({"keep_gathered": "auto", "memory_limit": "1GiB"}),
        counted({"memory_limit": None}),
        counted({"transport": "shm", "keep_gathered": True}),
    ]
    return expected, found


def test_settings_determine_gathers_but_not_results(pool2: Any) -> None:
    for (base, losses, usual), found in pool2.run(each_setting):
        assert base == [BOTH + 1, BOTH, BOTH, BOTH]  # the last unit is unknown at first
        gathers = [each[0] for each in found]
        assert gathers[0] == [FORWARD] * 4
        assert gathers[1] == [BOTH - 1, BOTH - 2, BOTH - 2, BOTH - 2]
        assert gathers[2] == [BOTH + 1, BOTH, FORWARD, FORWARD]  # decided after the second step
        assert gathers[3] == base
        assert gathers[4] == [0] * 4
        assert [each[1] for each in found] == [losses] * len(found)
        for _, _, told in found:
            assert told["now"]["slots"] == told["predicted"]["slots"]
        slots = [told["now"]["slots"] - usual["now"]["slots"] for _, _, told in found[:4]]
        assert slots == [4 * UNIT, 2 * UNIT, 4 * UNIT, 0]  # of six units; two slots existed
        assert "stay gathered from forward to backward" in found[0][2]["head"]
        assert "gather" not in usual["head"] + found[4][2]["head"]


@on_ranks(2)
def test_auto_uses_the_least_of_all_ranks():
    own = 1 if dist.get_rank() == 0 else 3
    nothing, one, three, least = [with_limit(extra * UNIT) for extra in (0, 1, 3, own)]
    assert nothing == [BOTH + 1, BOTH, BOTH, BOTH]
    assert one[2:] == least[2:] == [BOTH - 1] * 2
    assert three[2:] == [BOTH - 3] * 2


@on_ranks(4)
def test_replicas_keep_the_same_units():
    options = {"strategy": "hybrid_shard", "device_mesh": mesh_of(2, 2)}
    expected = counted({"keep_gathered": False, **options})
    extra = 2 if dist.get_rank() == 3 else 5  # the other replica must keep as few
    spare_bytes = extra * UNIT * 10 // 9 + 10
    ours = counted({"memory_limit": expected[2]["peak"]["total"] + spare_bytes, **options})
    (base, losses) = expected[:2]
    (gathers, same) = ours[:2]
    assert base[1:] == [BOTH] * 3 and gathers[2:] == [BOTH - 2] * 2 and same == losses


# --- predictions and refusals ---------------------------------------------------------------------


@on_ranks(2)
def test_predictions_include_kept_units():
    found = []
    for keep in (True, 3 * UNIT, False):
        model = stack(keep_gathered=keep)
        plain = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)])
        told = zshard.predict_memory(
            plain, 2, transport="c10d", auto_wrap_policy={nn.Linear}, keep_gathered=keep
        )
        found.append((model.memory()["slots"], told["slots"]))
    tight = UNITS * UNIT  # for the gathered units, and for no shard
    text = message_of(lambda: stack(keep_gathered=True, memory_limit=tight), MemoryError)
    assert found == [(each, each) for each in (6 * UNIT, 5 * UNIT, 2 * UNIT)]
    assert "does not fit" in text


WRONG = {None: TypeError, 1.5: TypeError, "all": ValueError, -1: ValueError, 0: ValueError}


@on_ranks(2)
def test_misuse_is_an_error_that_names_the_argument():
    rank = dist.get_rank()
    differ, sizes, *texts = [
        message_of(lambda: stack(keep_gathered=rank == 0), zshard.DivergenceError),
        message_of(lambda: stack(keep_gathered=(rank + 1) * 1024), zshard.DivergenceError),
        *(
            message_of(lambda given=given: stack(keep_gathered=given), WRONG[given])
            for given in WRONG
        ),
    ]
    assert re.search(r"differ between ranks: keep_gathered.*True.*False", differ)
    assert re.search(r"differ between ranks: keep_gathered.*1024 bytes.*2048 bytes", sizes)
    for text in texts:
        assert text.startswith("keep_gathered must be ")


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


BEFORE = {each.__name__: each for each in (raise_first, evaluate_first, forward_only, accumulate)}


@pytest.mark.parametrize("name", BEFORE)
@on_ranks(2)
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


@on_ranks(2)
def test_optimizer_in_backward():
    results = []
    for keep in (False, "auto"):
        model = stack(keep_gathered=keep)
        optimizer = zshard.AdamW(model.parameters(), lr=0.01)
        model.optimizer_in_backward(optimizer)
        results.append(go(model, optimizer))
    (_, losses), (gathers, ours) = results
    assert gathers[2:] == [FORWARD, FORWARD] and ours == losses


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


def measured() -> Any:
    found = []
    for used in (100, 96, 10):
        with host([100 * UNIT - 1000], [used * UNIT]):
            model = stack()
            found.append(go(model, torch.optim.SGD(model.parameters(), 0.1), range(5))[0])
    kept = unit_of(model[0]).engine.gathered()
    return found, kept, model.memory()["slots"] == model.memory("predicted")["slots"]


def test_auto_leaves_a_tenth_of_what_is_left(pool2: Any) -> None:
    for (full, three, all_), kept, fits in pool2.run(measured):
        assert full[2:] == [BOTH] * 3
        assert three[2:] == [BOTH - 3] * 3  # of four that would fit
        assert all_[2:] == [FORWARD] * 3
        assert kept[:2] == (5 * UNIT, 5 * UNIT) and fits


def decided_once() -> Any:
    """The second step has 4.5 units left, and later ones have none."""
    with host([100 * UNIT - 1000], [int(95.5 * UNIT), 200 * UNIT]):
        model = stack()
        return go(model, torch.optim.SGD(model.parameters(), 0.1), range(6))[0]


def test_later_steps_do_not_change_what_stays(pool2: Any) -> None:
    for gathers in pool2.run(decided_once):
        assert gathers[2:] == [BOTH - 4] * 4


def two_models() -> Any:
    """Two models share the memory."""
    with host([100 * UNIT - 1000], [int(95.5 * UNIT)]):
        models = [stack(), stack()]
        steppers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
        for step in range(2):
            for model, optimizer in zip(models, steppers, strict=True):
                loss_of(model(batch(step))).backward()
                optimizer.step()
        return [unit_of(model[0]).engine.gathered()[0] for model in models]


def test_two_models_share_the_memory(pool2: Any) -> None:
    assert pool2.run(two_models) == [[4 * UNIT, 0]] * 2


# --- per-unit settings ----------------------------------------------------------------------------


@over("c10d")
def by_hand() -> Any:
    found = []
    for keep in (True, "auto"):
        model = stack(keep_gathered=keep)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model[0].set_reshard_after_forward(True)
        gathers = [go(model, optimizer)[0]]
        model[1].set_reshard_after_forward(True)  # after the decision
        gathers.append(go(model, optimizer)[0])
        model[1].set_reshard_after_forward(False)
        gathers.append(go(model, optimizer)[0])
        found.append(gathers)
    for reshard in (None, True):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)])
        for layer in model:
            fully_shard(layer, reshard_after_forward=reshard)
        fully_shard(model)
        found.append(go(model, torch.optim.SGD(model.parameters(), 0.1))[0])
    return found


def test_per_unit_settings_take_precedence(pool2: Any) -> None:
    for told, auto, *sharded in pool2.run(by_hand):
        for first, second, third in (told, auto):
            assert first[2:] == [FORWARD + 1] * 2
            assert second[1:] == [FORWARD + 2] * 3
            assert third[1:] == [FORWARD + 1] * 3
        assert sharded[0][2:] == [FORWARD] * 2
        assert sharded[1][2:] == [BOTH] * 2


@on_ranks(2)
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
