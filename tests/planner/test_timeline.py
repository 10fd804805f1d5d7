"""The step in time: how collectives and kernels wait for each other, and the schedule's order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from models import CASES, train, wrapped
from spawn import ranks
from torch import nn
from torch.profiler import profile

from zshard import _core
from zshard.extras.planner.durations import all_reduce, gather
from zshard.extras.planner.gpus import Network
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


def played(gathers, reduces, kernels=1.0):
    four = [kernels] * 4
    return play(TWO_UNITS, MARKS, Durations(four, four, gathers, reduces))


def test_without_communication_a_step_is_its_kernels():
    found = played([0, 0], [0, 0])
    assert found.seconds == 8
    assert found.exposed == {}


def test_a_gather_ahead_is_hidden_behind_kernels():
    found = played([0.5, 0.75], [0, 0])
    # unit 0's gather has nothing to hide behind; unit 1's follows it on the wire
    assert found.exposed == {("gather", 0): 0.5}
    assert found.seconds == 8.5


def test_collectives_follow_one_another_on_the_wire():
    found = played([0.5, 3.0], [0, 0])
    assert found.exposed == {("gather", 0): 0.5, ("gather", 1): 2.0}
    assert found.seconds == 8 + 0.5 + 2.0


def test_a_reduction_is_waited_for_at_the_end():
    found = played([0, 0], [1.5, 0])
    assert found.exposed == {("reduce", 0): 0.5}
    assert found.seconds == 8.5


def test_collectives_take_the_slower_link():
    network = Network(link=300, nic=400, per_host=8)
    inside, across = gather(network, 1e9, 8), gather(network, 1e9, 16)
    assert gather(network, 1e9, 1) == 0
    assert inside == pytest.approx(1e9 * 7 / 8 / 240e9, rel=0.02)
    assert across == pytest.approx(1e9 * 15 / 16 / 42.5e9, rel=0.02)
    assert all_reduce(network, 1e9, 1) == 0
    assert all_reduce(network, 1e9, 2) > gather(network, 1e9, 16)


def events_of(model, transport, world):
    world_of_ranks = World(world, world, transport, transport)
    run = dry_run_of(model, "auto", arguments_of(Way(precision="fp32")), world_of_ranks)
    return [spec.name for _, spec in run.in_order], run.engine.predict_events()


def order_in_a_run(transport):
    """Units by their gathers and reductions in the fourth step of a real run."""
    case = CASES["net"]
    model = wrapped(case.make, ("full_shard", transport), auto_wrap_policy="auto")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, case, optimizer, dist.get_rank(), steps=3)
    with profile() as profiler:
        train(model, case, optimizer, dist.get_rank(), steps=1)
    names = {"zshard::all_gather (": "gather", "zshard::reduce_scatter (": "post"}
    found = []
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        for prefix, act in names.items():
            if event.name.startswith(prefix):
                unit = event.name.removeprefix(prefix)[:-1]
                found.append((act, "" if unit == "root" else unit))
    return found


@ranks(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_predicted_events_are_those_of_a_run(pool, transport):
    names, events = events_of(CASES["net"].make(), transport, 2)
    predicted = [(act, names[at]) for act, at in events if act in ("gather", "post")]
    # Over shm a round begins once autograd has its gradients: the root's come at another moment.
    left_out = [("post", "")] if transport == "shm" else []
    for order in pool.run(order_in_a_run, transport):
        assert sorted(order) == sorted(predicted)
        both = [[each for each in found if each not in left_out] for found in (order, predicted)]
        assert both[0] == both[1]


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
