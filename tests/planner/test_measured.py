"""Measured plans: each operation of a step runs alone, and FSDP runs with units that do nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import CASES, loss_of, train, wrapped
from spawn import ranks
from torch import nn

import zshard
from zshard import DivergenceError
from zshard.memory.dry_run import World
from zshard.memory.report import STATE_TENSORS
from zshard.planner import costs, measured
from zshard.planner.beside import as_rank, beside
from zshard.planner.decoder import Decoder
from zshard.planner.gpus import DEVICES, Network
from zshard.planner.kernels import trace
from zshard.planner.measured import Cost, Curve, Machine
from zshard.planner.prediction import predict
from zshard.planner.timeline import COMPUTE, Durations, play
from zshard.planner.ways import Cluster, Way
from zshard.planner.workloads import Workload, decoder
from zshard.trace import RankTrace, Trace

CPU = torch.device("cpu")
DIMS = zshard.Dims(layers=5, width=32, heads=4, kv_heads=2, ffn=64, vocab=50, seq=16)


def quickly() -> Any:
    return mock.patch.multiple(measured, CALLS=1, SECONDS=0.0, ELEMENTS=1 << 10, STEPS=1)


@pytest.fixture
def quick() -> Iterator[None]:
    with quickly():
        yield


def conv() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1)),
        *(nn.Flatten(), nn.Linear(8 * 9, 5)),
    )


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.bag = nn.Embedding(11, 6), nn.EmbeddingBag(11, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.bag(ids)[:, None]
        found = self.attention(x, x, x)[0].cumsum(1).logsumexp(1)
        return nn.functional.cross_entropy(found, ids[:, 0])


STEPS = {
    "conv": (conv, lambda model: model(torch.zeros(2, 3, 8, 8)).square().mean(), None),
    "embeddings": (Words, lambda model: model(torch.zeros(3, 2, dtype=torch.int64)), None),
    "decoder in bf16": (
        lambda: Decoder(DIMS),
        lambda model: model(torch.zeros(2, 16, dtype=torch.int64)),
        torch.bfloat16,
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_each_operation_of_a_step_can_run_alone(name, quick, monkeypatch):
    make, loss, dtype = STEPS[name]
    model = make()
    found = trace(model, [model], loss, dtype)
    machine, timed = Machine(CPU), []
    alone = machine._seconds

    def seconds(operation):
        timed.append(operation)
        return alone(operation)

    monkeypatch.setattr(machine, "_seconds", seconds)
    first = machine.of_segments(found.forward)
    kernels = [kernel for segment in found.forward for kernel in segment.kernels]
    assert len(timed) == len(set(timed)) == len({kernel.operation for kernel in kernels})
    assert machine.of_segments(found.forward) == first  # not measured again
    assert len(timed) == len(set(timed))
    assert sum(machine.of_segments(found.backward)) > 0


def test_recurrent_layers_are_refused(quick):
    model = nn.LSTM(4, 4)
    found = trace(model, [model], lambda model: model(torch.zeros(3, 2, 4))[0].sum())
    with pytest.raises(ValueError, match=r"mkldnn_rnn.* cannot run alone"):
        Machine(CPU).of_segments(found.forward)


def test_a_layer_used_twice_is_measured_once(quick):
    dims = DIMS._replace(layers=9)
    two = [decoder(each).traced([], 1, "", None) for each in (DIMS, dims)]
    few, many = ({k.operation for s in each.forward for k in s.kernels} for each in two)
    assert few == many


def test_random_numbers_of_the_script_stay_as_they_are(quick):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    found = trace(model, [model], lambda model: model(torch.zeros(2, 4)).sum())
    state = torch.get_rng_state()
    Machine(CPU).of_segments(found.forward)
    assert torch.equal(torch.get_rng_state(), state)


def test_costs_lie_on_lines_through_what_was_measured():
    curve = Curve([10, 20, 40], [Cost(1.0, 0.5), Cost(2.0, 1.0), Cost(6.0, 1.0)])
    assert curve.at(10) == Cost(1.0, 0.5)
    assert curve.at(15) == Cost(1.5, 0.75)
    assert curve.at(30) == Cost(4.0, 1.0)
    assert curve.at(60) == Cost(10.0, 1.0)
    assert curve.at(1) == Cost(1.0, 0.5)  # fewer elements take as long as the fewest


@pytest.mark.parametrize(
    ("strategy", "world", "kept", "again"),
    [
        ("full_shard", World(2, 2, "c10d", "c10d"), False, 1.0),
        ("full_shard", World(2, 2, "c10d", "c10d", 1), True, 0.0),
        ("shard_grad_op", World(2, 2, "c10d", "c10d"), False, 0.0),
        ("no_shard", World(2, 2, "shm", "shm"), False, 0.0),
    ],
)
def test_gathers_of_a_backward_are_not_counted_as_reductions(strategy, world, kept, again):
    wrapped: Any = SimpleNamespace(way=Way(strategy, precision="fp32"), world=world, kept=kept)
    assert costs._gathered_again(wrapped, 6) == pytest.approx(again, abs=0.2)


def test_work_of_a_collective_delays_the_kernels_of_its_rank():
    events = [("gather", 0), ("forward", 0), ("bind", 0), ("forward", 1), ("backward", 0)]
    four = [1.0, 1.0, 1.0]
    marks = {0: 0, 1: 1}
    without = Durations(four, four, [-1, 0, -1], [1.5], [0.0])
    busy = without._replace(work={"gather": [0.75], "reduce": [0.0]})
    first, second = (play(events, marks, each) for each in (without, busy))
    # the gather is over after 1.5 s in both; the kernels before it end 0.75 s later
    assert first.exposed == {("gather", 0): 0.5}
    assert second.seconds == first.seconds + 0.25
    assert second.exposed == {}


# --- over ranks -----------------------------------------------------------------------------------


def workload_of_net() -> Workload:
    case = CASES["net"]
    ids = case.batch(0, 0)
    return Workload(
        case.make(), lambda model, _: loss_of(model(torch.zeros_like(ids))), 1, "samples"
    )


def planned(transport: str, strategy: str) -> Any:
    machine = Machine(CPU, transport)
    assert (machine.transport, machine.per_host) == (transport, 2)
    assert machine.room() > 1 << 20
    cluster = Cluster(DEVICES["h100"], 2, Network(1, 1, 2), transport, machine)
    return predict(workload_of_net(), Way(strategy, precision="fp32"), cluster)


def timelines(transport: str, strategy: str) -> Any:
    with quickly():
        found = planned(transport, strategy)
    return found.seconds, found.timeline


@ranks(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_all_ranks_plan_the_same(pool, transport, strategy):
    first, second = pool.run(timelines, transport, strategy)
    assert first == second
    assert first[0] > first[1].seconds > 0
    kernels = [span.what for span in first[1].spans if span.resource == COMPUTE]
    assert {"forward", "backward"} <= set(kernels)


def compared(transport: str) -> tuple[str, Any, Any]:
    with quickly():
        found = planned(transport, "full_shard")
    case = CASES["net"]
    model = wrapped(case.make, ("full_shard", transport), auto_wrap_policy="auto")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with zshard.profile() as traced:
        train(model, case, optimizer, dist.get_rank(), steps=2)
    if dist.get_rank() != 0:
        return "", {}, {}
    both = beside(traced, found)
    with pytest.raises(ValueError, match="no optimizer step: trace whole steps"):
        beside(Trace([traced.ranks[0]._replace(ranges=[])]), found)
    events = json.loads(both.trace.to_json())
    return str(both), both._replace(trace=events), found.timeline


@ranks(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_plan_stands_beside_a_trace(pool, transport):
    text, both, timeline = pool.run(compared, transport)[0]
    assert set(both.planned) == set(both.measured)  # the same units, and what is in none
    kernels = sum(s.seconds for s in timeline.spans if s.what in ("forward", "backward"))
    planned = sum(times["forward"] + times["backward"] for times in both.planned.values())
    assert planned == pytest.approx(kernels, abs=1e-6)
    assert [each["rank"] for each in both.trace] == [0, 1, 2]
    measured = sum(unit["forward"] for each in both.trace[:2] for unit in each["units"])
    total = sum(times["forward"] for times in both.measured.values())
    assert total == pytest.approx(measured / 2 / 2)  # ranks, and steps
    assert text.splitlines()[-1].startswith("all ")


def differing() -> str:
    with quickly():
        machine = Machine(CPU)
        model = nn.Linear(4, 4 + dist.get_rank())
        found = trace(model, [model], lambda model: model(torch.zeros(2, 4)).sum())
        with pytest.raises(DivergenceError) as caught:
            machine.of_segments(found.forward)
    return str(caught.value)


@ranks(2)
def test_plans_of_different_models_diverge(pool):
    for text in pool.run(differing):
        assert text.startswith("the plans differ between ranks")


def plans() -> Any:
    case = CASES["net"]
    ids = case.batch(0, 0)
    model = case.make()
    with quickly():
        found = zshard.plan(
            model,
            step=lambda model, n: loss_of(model(torch.zeros(n, *ids.shape[1:], dtype=ids.dtype))),
            batch=4,
            measure=True,
            transport="shm",
            strategies=["full_shard", "no_shard"],
            precision="fp32",
        )
    return str(found), json.loads(found.to_json()), found.line(), found.limit


@ranks(2)
def test_the_ranks_of_a_run_plan_for_themselves(pool):
    first, second = pool.run(plans)
    assert first[:2] == second[:2]
    text, facts, line, limit = first
    assert "on 2 x cpu, measured over shm" in text and line.startswith("FSDP(model")
    assert (facts["gpus"], facts["gpu"]) == (2, "cpu")
    assert [each["micro_batch"] * each["accumulate"] for each in facts["ways"]] == [2, 2]
    assert all(each["seconds"] > 0 and each["fits"] for each in facts["ways"])
    assert limit > 1 << 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs gpus= and gpu=, or measure=True"),
        ({"gpus": 2, "gpu": "h100", "transport": "shm"}, "which alone takes transport="),
        ({"measure": True, "gpus": 2, "batch": 2}, "leave gpus= out"),
        ({"measure": True, "batch": 2, "nic": 10.0}, "leave nic= out"),
        ({"measure": True}, "needs batch="),
        ({"measure": True, "batch": 2, "compiled": True}, "PyTorch's own kernels"),
        ({"measure": True, "batch": 2, "precision": "fp8"}, "PyTorch's own kernels"),
        ({"measure": True, "batch": 2, "optimizer": 3}, "optimizer=3: no step of it"),
        ({"measure": True, "batch": 2, "optimizer": "muon"}, "optimizer='muon': no step of it"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message, quick):
    with pytest.raises(ValueError, match=message):
        zshard.plan(DIMS, **arguments)


@pytest.mark.parametrize("name", [*STATE_TENSORS, "Adam8bit", "adamw8bit", "sgd8bit"])
def test_every_elementwise_optimizer_is_made_by_its_name(name):
    optimizer = measured.optimizer_of(name, nn.Linear(2, 2))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert type(optimizer).__name__.lower() == name.lower()
    assert type(optimizer) is getattr(zshard, type(optimizer).__name__, type(optimizer))


def test_one_process_plans_for_itself(quick):
    found = zshard.plan(DIMS, measure=True, batch=2, precision="fp32", optimizer="adamw8bit")
    assert found.ranks == 1 and {each.way.strategy for each in found.predictions} == {"no_shard"}


def other_batch() -> str:
    batch = 2 + 2 * dist.get_rank()
    with quickly(), pytest.raises(DivergenceError) as caught:
        zshard.plan(DIMS, measure=True, batch=batch, precision="fp32")
    return str(caught.value)


def test_offload_to_the_host_has_no_effect_on_cpu_ranks(quick):
    # A batch of one sample has one way to be computed, whichever is fastest here.
    options = {"measure": True, "batch": 1, "precision": "fp32", "strategies": ["no_shard"]}
    plans = [zshard.plan(DIMS, offload=offload, **options) for offload in (None, True)]
    none, host = (
        next(
            each
            for each in plan.predictions
            if not each.way.checkpointing and each.way.accumulate == 1
        )
        for plan in plans
    )
    assert host.way.offload is None and host.memory == none.memory
    assert "offload" not in plans[1].line()


@ranks(2)
def test_plans_with_different_arguments_diverge(pool):
    for text in pool.run(other_batch):
        assert "the plans differ between ranks" in text and "batch" in text


def test_a_planned_step_has_all_of_its_micro_batches():
    found = zshard.plan(DIMS, 2, "h100", batch=16, strategies=["full_shard"]).predictions[0]
    twice = found._replace(way=found.way._replace(accumulate=2), seconds=2 * found.seconds)
    empty = Trace([RankTrace(0, "here", 1, 0, 1, 0, 0, [])])
    once, both = (as_rank(each, empty).ranges for each in (found, twice))
    kernels = [sum("forward" in name for name, *_ in ranges) for ranges in (once, both)]
    assert kernels[1] == 2 * kernels[0] > 0
    assert both[-1][0] == "optimizer.step" and both[-1][3] == round(2e9 * found.seconds)
