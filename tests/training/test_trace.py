"""zshard.profile(), ZSHARD_TRACE, `python -m zshard trace`, model.metrics(), and torch.profiler."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import sys
import time
import warnings
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from groups import case_of, hosts_of
from nursery import fork_ranks
from scenario import Scenario, Training
from spawn import on_ranks, ranks
from torch import nn
from torch.profiler import profile

import zshard
from zshard import FSDP, _core
from zshard.__main__ import main
from zshard.extras import trace
from zshard.extras.trace import RankTrace, Trace, bounds
from zshard.extras.trace.times import Arrival, arrivals_of, own_times, summary_of

OF_TORCH = ("zshard::backward", "zshard::optimizer.step")
LATE = 1.0  # seconds: far more than a busy machine delays the other rank by


def trained(transport="shm", strategy="full_shard", steps=1):
    """Return a model in training, after so many steps."""
    options = {"auto_wrap_policy": "auto"}
    return Scenario("net", (strategy, transport), "torch.SGD", options=options).sharded(steps)


def late_step(training, seconds=LATE):
    """A step for which rank 1 is late."""
    time.sleep(seconds if dist.get_rank() == 1 else 0)
    training.go(1)


def recorded(transport, file):
    """Return each rank's trace of two steps, with rank 1 late for the second. Torch's profiler,
    which records backwards and steps itself, has the other ranges."""
    training = trained(transport)
    with profile() as profiler, zshard.profile(file) as traced:
        training.go(1)
        late_step(training)
    own = next(each for each in traced.ranks if each.rank == dist.get_rank())
    names = {name for name, *_ in own.ranges if not name.startswith(OF_TORCH)}
    assert len(names) > 10 and names <= {event.key for event in profiler.key_averages()}
    return traced.ranks, traced.to_json()


@ranks(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_rank_0_has_all_ranks(pool, tmp_path, transport):
    file = tmp_path / "trace.json.gz"
    (all_ranks, text), (own, _) = pool.run(recorded, transport, str(file))
    assert [each.rank for each in all_ranks] == [0, 1] and [each.rank for each in own] == [1]
    assert all_ranks[1].ranges == own[0].ranges
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    for each in all_ranks:
        check_ranges(each)
    summary, report = json.loads(text), Trace(all_ranks).report()
    check_waits(summary, "rank 1" if transport == "shm" else "all ranks")
    check_who_was_last(summary, report)
    assert report.startswith("rank 0: ")
    if transport == "shm":
        check_clock(*all_ranks)


def check_ranges(each):
    """Each unit has its ranges, and those of a thread are nested or apart."""
    names = [name.removeprefix("zshard::") for name, *_ in each.ranges]
    units = {name[9:-1] for name in names if name.startswith("forward (")}
    assert "root" in units and len(units) > 2
    for unit in units - {"root"}:
        kinds = ("forward", "all_gather", "unshard", "backward", "pack", "reduce_scatter")
        for kind in (*kinds, "sum_gradients"):
            assert f"{kind} ({unit})" in names, (kind, unit, names)
    assert names.count("optimizer.step") == names.count("backward") == 2
    open_ = {}
    for name, thread, begun, ended in sorted(each.ranges, key=lambda of: (of[2], -of[3])):
        assert each.begun <= begun <= ended <= each.ended
        stack = open_.setdefault(thread, [])
        while stack and stack[-1] <= begun:
            stack.pop()
        assert not stack or ended <= stack[-1], name
        stack.append(ended)


def check_waits(summary, whom):
    first, second = summary
    assert first["exposed_seconds"] > second["exposed_seconds"]
    assert first["steps"] == second["steps"] == 2
    longest = first["waits"][0]
    assert longest["for"] == whom and longest["unit"] == "root"
    assert longest["seconds"] >= longest["longest"] > LATE / 2
    waited = sum(unit["wait"] for unit in first["units"])
    assert waited == pytest.approx(first["exposed_seconds"]) and first["exposed_share"] < 1


def check_who_was_last(summary, text):
    """Rank 1, over every transport; a wait over c10d also says so."""
    first, second = summary
    last = second["last"]
    assert last["longest"] > LATE / 2 and last["seconds"] >= last["longest"]
    assert last["what"].startswith(("forward (root)", "all_gather ("))
    assert first["last"]["longest"] < last["longest"]
    assert 0 < first["last"]["count"] + last["count"] <= first["last"]["of"] == last["of"]
    assert f"ms: {last['what']}" in text
    longest = first["waits"][0]
    if longest["for"] == "all ranks":
        assert longest["last"]["1"] >= 1 and "; rank 1 came last to " in text
    else:
        assert longest["last"] == {}


def check_clock(first, second):
    """Ranks are on one clock: rank 1 begins a step while rank 0 waits for it."""
    wait = max((e - b, b, e) for name, _, b, e in first.ranges if "wait for rank 1" in name)
    begins = [b for name, _, b, _ in second.ranges if name == "zshard::forward (root)"]
    assert any(wait[1] < begun < wait[2] for begun in begins)


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_memory_by_part_over_time(tmp_path, transport, no_sync):
    """The memory in the trace of two steps, and in its file, is that of the model."""
    file, x, unit = str(tmp_path / "a.json"), torch.randn(3, 64), 64 * 64 * 4
    layers = [nn.Linear(64, 64, bias=False) for _ in range(4)]
    model = FSDP(nn.Sequential(*layers), transport=transport, auto_wrap_policy={nn.Linear})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with zshard.profile(file, merge=False) as traced:
        for _ in range(2):
            for _ in range(no_sync):
                with model.no_sync():
                    model(x).sum().backward()
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    seen, peak = list(traced.ranks[0].memory), model.memory("peak")
    assert list(trace.read([trace._own_name(file, dist.get_rank())]).ranks[0].memory) == seen
    assert all(a[1] <= b[1] for a, b in pairwise(seen))
    assert {name for name, *_ in seen} == {seen[0][0]} and "Sequential" in seen[0][0]
    samples = [parts for *_, parts in seen]
    assert max(sum(parts.values()) for parts in samples) == peak["total"]
    for part in ("shards", "grads", "slots", "buckets", "transport"):
        assert max(parts[part] for parts in samples) == peak[part], part
    slots, grads, shards = ({parts[p] for parts in samples} for p in ("slots", "grads", "shards"))
    assert slots == ({0} if transport == "shm" else {0, unit, 2 * unit})
    assert no_sync or grads == {n * unit // 2 for n in range(5)}
    assert shards == {4 * unit // 2}
    last = samples[-1]
    assert last["slots"] == last["buckets"] == 0 and last["grads"] == 2 * unit


def stop_tracing():
    _core.trace_stop()


@on_ranks(2)
def test_only_what_runs_within_is_recorded():
    training = trained()
    with zshard.profile(merge=False) as empty:
        pass
    child = next(training.model.children())
    stop = child.register_forward_pre_hook(lambda *_: stop_tracing())
    with zshard.profile() as cut:
        training.go(1)
    stop.remove()
    with zshard.profile() as again, pytest.raises(RuntimeError, match="a trace runs already"):
        zshard.profile().__enter__()
    assert [len(each.ranks[0].ranges) for each in (empty, cut, again)] == [0, 0, 0]


@on_ranks(2)
def test_exception_on_one_rank_leaves_each_its_own(tmp_path):
    """A rank warns where another has left its profile(); the next profile() is of all again."""
    training, rank = trained(), dist.get_rank()
    traced = zshard.profile(str(tmp_path / "a.json"))
    with warnings.catch_warnings(record=True) as seen, contextlib.suppress(ValueError), traced:
        warnings.simplefilter("always")  # also if an earlier test has set it on these ranks
        training.go(1)
        if rank == 1:
            raise ValueError("out of data")
    with zshard.profile() as after:  # the ranks meet again
        training.go(1)
    assert [len(each.ranks) for each in (traced, after)] == [1, 2 - rank]
    said = [str(each.message) for each in seen]
    assert rank == 1 or "rank 1 left its profile() by ValueError" in said[0]
    dist.barrier()
    assert {path.name for path in tmp_path.iterdir()} == {"a.rank0.json", "a.rank1.json"}


def measured(strategy):
    training = trained("shm", strategy, steps=0)
    model = training.model
    before = model.metrics()
    for _ in range(3):
        late_step(training, LATE / 10)
        norm = model.clip_grad_norm_(1.0)
        training.optimizer.step()
    return before, float(norm), model.metrics()


@ranks(2)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_metrics(pool, strategy):
    (before, norm, first), (_, _, second) = pool.run(measured, strategy)
    assert not before.keys() & {"seconds/step", "seconds/wait", "grad_norm"}
    assert type(first) is dict  # zshard.save(extra=), torch.load() and pytrees take no subclass
    assert first["seconds/wait"] > second["seconds/wait"] >= 0
    assert first["seconds/step"] > first["seconds/wait"] > LATE / 20
    assert first["grad_norm"] == second["grad_norm"] == norm
    assert first["memory/peak/total"] >= first["memory/now/total"] > 0
    assert all(type(value) is float for value in first.values())


# --- torch's profiler -----------------------------------------------------------------------------


@on_ranks(2)
def test_profiler_started_or_stopped_within_a_forward():
    """A profiler stops, and another starts, between a unit's hooks; then a forward raises."""
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
            late_step(training.go(1))
            time.sleep(LATE)  # torch's threads end their ranges after the waiting threads continue
        training.go(2)
    names = {event.name for event in profiler.events()}
    assert any(name.startswith("zshard::") for name in names)
    assert not names & {"gloo:send", "gloo:recv"}, names


# --- parts of a trace -----------------------------------------------------------------------------


def test_a_wait_is_of_the_unit_around_it_and_counts_once():
    wait = "zshard::wait for rank 3 to begin forward of 'Net'"
    ranges = [
        ("zshard::forward (root)", 7, 0, 100),
        ("zshard::forward (a)", 7, 10, 60),
        (wait, 7, 20, 50),
        ("zshard::save", 8, 30, 40),
    ]
    assert sorted(own_times(ranges)) == [
        ("calls", "", "zshard::save", 10),
        ("forward", "a", "zshard::forward (a)", 20),
        ("forward", "root", "zshard::forward (root)", 50),
        ("wait", "a", wait, 30),
    ]


def test_n_th_collective_of_a_rank_is_the_n_th_of_all():
    names = ["all_gather (a)", "reduce_scatter (a)", "all_gather (a)", "all_gather (b)"]

    def rank(number, begins, shift=0):
        ranges = [(f"zshard::{names[i]}", 7, at, at + 5) for i, at in enumerate(begins)]
        return RankTrace(number, "host", 9, 0, 100, 0, 0, ranges, (), shift, error=1)

    of_all = [
        rank(0, [0, 20, 40, 60]),
        rank(1, [6, 11, 50, 70], shift=2),  # 8, 13, 52, 72
        rank(2, [3, 22, 41]),  # it skips b
    ]
    assert arrivals_of(of_all) == [
        Arrival(8, 1, 5, "all_gather (a)"),  # 22 after 20 is too close for clocks with errors
        Arrival(52, 1, 11, "all_gather (a)"),
    ]
    assert arrivals_of(of_all[:1]) == arrivals_of([]) == []


def test_lateness_counts_once():
    arrivals = [
        Arrival(10, 0, 3, "forward (root)"),
        Arrival(50, 1, 40, "forward (root)"),
        Arrival(52, 1, 41, "all_gather (a)"),
        Arrival(90, 1, 20, "reduce_scatter (a)"),
    ]
    last = summary_of(RankTrace(1, "host", 9, 0, 100, 0, 0, []), arrivals)["last"]
    expected = {"count": 3, "of": 4, "seconds": 62e-9, "longest": 41e-9, "what": "all_gather (a)"}
    assert last.pop("what") == expected.pop("what") and last == pytest.approx(expected)


def test_bounds_hold_the_difference_of_two_clocks():
    ahead = 5_000_000
    first = [(0, 900), (1000, 1500), (2000, 2900)]
    other = [(100 - ahead, 800 - ahead), (1200 - ahead, 1600 - ahead), (1900 - ahead, 2700 - ahead)]
    shift, error = bounds(first, other)
    assert abs(shift - ahead) <= error < 500


@on_ranks(2)
def test_clocks_of_hosts_are_compared():
    os.environ["ZSHARD_HOST"] = f"host{dist.get_rank()}"
    try:
        with zshard.profile() as traced:
            pass
    finally:
        del os.environ["ZSHARD_HOST"]
    if dist.get_rank() == 0:
        first, other = traced.ranks
        assert (first.host, first.shift, first.error) == ("host0", 0, 0)
        assert other.host == "host1"
        assert 0 <= abs(other.shift) <= other.error < LATE * 1e9  # in truth they are one clock


def test_command_merges_files(tmp_path, monkeypatch, capsys):
    """Files of two ranks, that of the second with its own clock; both did this at one time."""
    names, out = [], str(tmp_path / "merged.json")
    for rank, clock in enumerate((0, 5_000_000_000)):
        ranges = [("zshard::forward (root)", 9, clock + 2000, clock + 3500)]
        own = RankTrace(rank, f"host{rank}", 9, clock, clock + 9000, 10**18 - clock, 0, ranges)
        names.append(str(tmp_path / f"rank{rank}.json"))
        Trace([own]).export(names[-1])
    monkeypatch.setattr(sys, "argv", ["zshard", "trace", "--json", "-o", out, *names])
    assert main() == 0
    assert [each["rank"] for each in json.loads(capsys.readouterr().out)] == [0, 1]
    with open(out) as opened:
        events = [each for each in json.load(opened)["traceEvents"] if each["ph"] == "X"]
    assert [(each["pid"], each["ts"], each["dur"]) for each in events] == [(0, 2, 1.5), (1, 2, 1.5)]
    again, before = ([each.ranges for each in trace.read(of).ranks] for of in ([out], names))
    assert again == before
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="no trace of zshard's"):
        trace.read([tmp_path / "other.json"])


# --- separate processes ---------------------------------------------------------------------------


@on_ranks(2, fresh=True)
def test_profile_on_one_rank_names_the_remedy(tmp_path):
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    done = tmp_path / "done"
    dist.barrier()
    if dist.get_rank() == 0:
        traced = zshard.profile(str(tmp_path / "a.json"))
        with pytest.raises(zshard.PeerTimeoutError, match=r"rank 1 .*merge=False"), traced:
            _core.trace_add("zshard::save", time.monotonic_ns())
        assert [name for name, *_ in traced.ranks[0].ranges] == ["zshard::save"]
        done.touch()
    while not done.exists():
        time.sleep(0.05)


def traced_by_environment():
    dist.init_process_group("gloo")
    trained()
    with pytest.raises(RuntimeError, match="ZSHARD_TRACE"), zshard.profile():
        pass
    dist.destroy_process_group()


def test_environment_traces_until_exit(tmp_path):
    env = {"ZSHARD_TRACE": str(tmp_path / "run.json")}
    fork_ranks(traced_by_environment, 2, env=env, check=True)
    names = sorted(os.listdir(tmp_path))
    assert names == ["run.rank0.json", "run.rank1.json"]
    merged = trace.read(tmp_path / name for name in names)
    assert [each.rank for each in merged.ranks] == [0, 1]
    for each in merged.ranks:
        kinds = [name for name, *_ in each.ranges]
        assert kinds.count("optimizer.step") == 1 and "forward (root)" in kinds
        assert all(a[2] <= b[3] for a, b in pairwise(each.ranges))
