"""What torch.profiler shows of a sharded model: each unit's ranges, and whom a rank waits for."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from groups import case_of, hosts_of
from scenario import Scenario, Training
from spawn import on_ranks, ranks
from torch.profiler import profile

LATE = 1.0  # seconds: far more than a busy machine delays the other rank by


def trained(transport, strategy="full_shard"):
    options = {"auto_wrap_policy": "auto"}
    return Scenario("net", (strategy, transport), "torch.SGD", options=options).sharded(1)


def two_steps(training, late=0.0):
    training.go(1)
    time.sleep(late)
    training.go(1)


def profiled(transport, strategy, late):
    """Return seconds by name of the ranges of zshard in two steps; rank `late` is late for the second."""
    training = trained(transport, strategy)
    with profile() as profiler:
        two_steps(training, LATE if dist.get_rank() == late else 0.0)
    events = [event for event in profiler.key_averages() if event.key.startswith("zshard::")]
    return {event.key.removeprefix("zshard::"): event.cpu_time_total / 1e6 for event in events}


@ranks(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_wait_ranges_name_the_rank(pool, transport):
    waits = [
        {name: seconds for name, seconds in ranges.items() if name.startswith("wait for ")}
        for ranges in pool.run(profiled, transport, "full_shard", 1)
    ]
    assert sum(waits[0].values()) > sum(waits[1].values()), waits
    whom = "rank 1 to" if transport == "shm" else "all ranks"
    longest = max(waits[0], key=waits[0].get)
    assert longest.startswith(f"wait for {whom}"), longest


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_each_unit_has_its_ranges(strategy):
    sharded = ["reduce_scatter", "all_gather", "unshard"]
    whats = ["forward", "sum_gradients", *(sharded if strategy == "full_shard" else ["all_reduce"])]
    ranges = profiled("shm", strategy, -1)
    units = {name[9:-1] for name in ranges if name.startswith("forward (")}
    assert "root" in units and len(units) > 2, ranges
    for unit in units - {"root"}:
        for what in whats:
            assert f"{what} ({unit})" in ranges, (what, unit, ranges)


@on_ranks(2)
def test_profiler_started_or_stopped_within_a_forward():
    """A profiler that stops, and one that starts, between a unit's hooks; then a forward that raises."""
    training = trained("shm")
    head = training.model.head

    def fail():
        raise ValueError("in the middle")

    def step(hook):
        handle = head.register_forward_pre_hook(lambda *_: hook())
        try:
            training.go(1)
        finally:
            handle.remove()

    profiler = profile()
    profiler.start()
    step(profiler.stop)
    profiler = profile()
    step(profiler.start)
    profiler.stop()
    with profile(), pytest.raises(ValueError, match="in the middle"):
        step(fail)
    with profile() as profiler:
        training.go(1)
    assert "zshard::forward (root)" in {event.key for event in profiler.key_averages()}


@on_ranks(4)
def test_messages_between_hosts_outlast_the_profile():
    """Torch writes an operation's end to the profile that saw its beginning, also to one that has
    been freed; the receive of the next turn is always under way."""
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with hosts_of(2, 2) as group:
        model = case_of(group, "net")
        training = Training(Scenario("net", optimizer="torch.SGD"), model, model, dist.get_rank())
        with profile(experimental_config=config) as profiler:
            two_steps(training, LATE)
            time.sleep(LATE)  # torch's threads end what they record after those who wait go on
        two_steps(training)
    names = {event.name for event in profiler.events() if event.name.startswith("gloo:")}
    assert "gloo:scatter" in names
    assert not names & {"gloo:send", "gloo:recv"}, names
