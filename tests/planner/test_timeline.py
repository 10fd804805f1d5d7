"""The step in time: how collectives and kernels wait for each other, and the schedule's order."""

from __future__ import annotations

import pytest
from models import CASES
from scenario import Scenario
from spawn import on_ranks
from torch import nn
from torch.profiler import profile

from zshard import _core
from zshard.extras.planner.timeline import Durations, play
from zshard.extras.planner.ways import Way, arguments_of
from zshard.memory.dry_run import World
from zshard.memory.report import dry_run_of

TWO_UNITS = [
    *(("forward", 0), ("gather", 0), ("gather", 1), ("bind", 0), ("forward", 1), ("bind", 1)),
    *(("forward", 2), ("backward", 2), ("post", 1), ("backward", 1), ("post", 0)),
    *(("backward", 0), ("sum", 1), ("sum", 0)),
]
MARKS = {0: 0, 1: 1, 2: 2}


STEPS = [  # seconds of gathers and reductions, and those that kernels wait for
    ([0, 0], [0, 0], {}),
    # unit 0's gather has nothing to hide behind; unit 1's follows it on the wire
    ([0.5, 0.75], [0, 0], {("gather", 0): 0.5}),
    ([0.5, 3.0], [0, 0], {("gather", 0): 0.5, ("gather", 1): 2.0}),
    ([0, 0], [1.5, 0], {("reduce", 0): 0.5}),  # waited for at the end
]


@pytest.mark.parametrize(("gathers", "reduces", "exposed"), STEPS)
def test_kernels_wait_for_what_they_do_not_hide(gathers, reduces, exposed):
    kernels = [1.0] * 4
    timeline = play(TWO_UNITS, MARKS, Durations(kernels, kernels, gathers, reduces))
    assert timeline.exposed == exposed
    assert timeline.seconds == 8 + sum(exposed.values())


def events_of(model, transport, world):
    world_of_ranks = World(world, world, transport, transport)
    run = dry_run_of(model, "auto", arguments_of(Way(precision="fp32")), world_of_ranks)
    return [spec.name for _, spec in run.in_order], run.engine.predict_events()


def order_in_a_run(transport):
    """Return units by their gathers and reductions in the fourth step of a run."""
    training = Scenario("auto", ("full_shard", transport), "torch.SGD").sharded(3)
    with profile() as profiler:
        training.go(1)
    names = {"zshard::all_gather (": "gather", "zshard::reduce_scatter (": "post"}
    order = []
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        for prefix, act in names.items():
            if event.name.startswith(prefix):
                unit = event.name.removeprefix(prefix)[:-1]
                order.append((act, "" if unit == "root" else unit))
    return order


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(2)
def test_predicted_events_are_those_of_a_run(transport):
    names, events = events_of(CASES["auto"].make(), transport, 2)
    predicted = [(act, names[at]) for act, at in events if act in ("gather", "post")]
    order = order_in_a_run(transport)
    assert sorted(order) == sorted(predicted)
    # Over shm a round begins once autograd has its gradients: the root's come at another moment.
    left_out = [("post", "")] if transport == "shm" else []
    ours, theirs = ([e for e in each if e not in left_out] for each in (order, predicted))
    assert ours == theirs


def test_events_pair_up():
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    names, events = events_of(model, "nccl", 4)
    gathers = [at for act, at in events if act == "gather"]
    assert gathers == [at for act, at in events if act == "bind"]
    posts = [at for act, at in events if act == "post"]
    assert sorted(posts) == [i for i, name in enumerate(names) if name]
    assert [at for act, at in events if act == "sum"] == posts
    started = set()
    for act, at in events:
        started |= {(act, at)} if act in ("gather", "post") else set()
        assert act != "bind" or ("gather", at) in started
        assert act != "sum" or ("post", at) in started
    assert isinstance(_core.Engine.predict_events.__doc__, str)
