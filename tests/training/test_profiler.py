"""What torch.profiler shows of a sharded model: each unit's ranges, and whom a rank waits for."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from groups import case_of, hosts_of
from models import CASES, train, wrapped
from spawn import on_ranks, ranks
from torch.profiler import profile

LATE = 1.0  # seconds: far more than a busy machine delays the other rank by


def step(model, case, late=0.0):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, case, optimizer, dist.get_rank(), steps=1)
    time.sleep(late)
    train(model, case, optimizer, dist.get_rank(), steps=1)


def profiled(transport, strategy, late):
    """Seconds by name of the ranges of zshard in two steps; rank `late` is late for the second."""
    case = CASES["net"]
    model = wrapped(case.make, (strategy, transport), auto_wrap_policy="auto")
    step(model, case)
    with profile() as profiler:
        step(model, case, LATE if dist.get_rank() == late else 0.0)
    events = [event for event in profiler.key_averages() if event.key.startswith("zshard::")]
    return {event.key.removeprefix("zshard::"): event.cpu_time_total / 1e6 for event in events}


@ranks(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_wait_ranges_name_the_rank(pool, transport):
    ranges = pool.run(profiled, transport, "full_shard", 1)
    whom = "rank 1 to" if transport == "shm" else "all ranks"
    waits = [sum(s for name, s in of.items() if name.startswith("wait for ")) for of in ranges]
    assert waits[0] > waits[1], ranges
    longest = max((s, name) for name, s in ranges[0].items() if name.startswith("wait for "))
    assert longest[1].startswith(f"wait for {whom}"), longest


@ranks(2)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_each_unit_has_its_ranges(pool, strategy):
    reduces = "reduce_scatter" if strategy == "full_shard" else "all_reduce"
    gathers = ["all_gather", "unshard"] if strategy == "full_shard" else []
    for ranges in pool.run(profiled, "shm", strategy, -1):
        units = {name[9:-1] for name in ranges if name.startswith("forward (")}
        assert "root" in units
        assert len(units) > 2, ranges
        for unit in units - {"root"}:
            for what in ["forward", reduces, "sum_gradients", *gathers]:
                assert f"{what} ({unit})" in ranges, (what, unit, ranges)


def step_alone(model, case):
    train(model, case, torch.optim.SGD(model.parameters(), 0.1), dist.get_rank(), steps=1)


@on_ranks(2)
def test_profiler_started_or_stopped_within_a_forward():
    """A profiler that stops, and one that starts, between a unit's hooks; then a forward that raises."""
    case = CASES["net"]
    model = wrapped(case.make, ("full_shard", "shm"), auto_wrap_policy="auto")
    profiler = profile()
    child = next(m for name, m in model.named_modules() if name == "head")
    handle = child.register_forward_pre_hook(lambda *_: profiler.stop())
    profiler.start()
    step_alone(model, case)
    handle.remove()
    profiler = profile()
    handle = child.register_forward_pre_hook(lambda *_: profiler.start())
    step_alone(model, case)
    handle.remove()
    profiler.stop()

    def fail(*_):
        raise ValueError("in the middle")

    handle = child.register_forward_pre_hook(fail)
    with profile() as profiler, pytest.raises(ValueError, match="in the middle"):
        step_alone(model, case)
    handle.remove()
    with profile() as profiler:
        step_alone(model, case)
    names = sorted(e.key for e in profiler.key_averages() if e.key.startswith("zshard::forward"))
    assert "zshard::forward (root)" in names, names


def seen_on_all_threads():
    """Names of what torch's process groups do in two steps; training goes on after the profile."""
    case = CASES["net"]
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with hosts_of(2, 2) as group:
        model = case_of(group, "net")
        with profile(experimental_config=config) as profiler:
            step(model, case, LATE)
            time.sleep(LATE)  # torch's threads end what they record after those who wait go on
        step(model, case)
    return {event.name for event in profiler.events() if event.name.startswith("gloo:")}


def test_messages_between_hosts_outlast_the_profile(pool4):
    """Torch writes an operation's end to the profile that saw its beginning, also to one that has
    been freed; the receive of the next turn is always under way."""
    for names in pool4.run(seen_on_all_threads):
        assert "gloo:scatter" in names
        assert not names & {"gloo:send", "gloo:recv"}, names
