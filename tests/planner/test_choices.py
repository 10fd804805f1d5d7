"""A plan's treatment of offload, wire codes, frozen parameters and optimizers."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest
import torch
from torch import nn

import zshard
from zshard import MixedPrecision, Offload, Wire, predict_memory
from zshard.extras.planner.costs import Costs
from zshard.extras.planner.durations import all_reduce, exchange, gather
from zshard.extras.planner.gpus import DEVICES, Network
from zshard.extras.planner.prediction import predict
from zshard.extras.planner.traffic import Traffic, ring, swap, swap_by_host
from zshard.extras.planner.update import Held, update_seconds
from zshard.extras.planner.ways import Cluster, Way
from zshard.extras.planner.workloads import Workload, decoder
from zshard.extras.planner.wrapped import Wrapped
from zshard.offload import CPUOffload

DIMS = zshard.Dims(layers=4, width=256, heads=4, kv_heads=4, ffn=1024, vocab=1000, seq=128)
LARGE = zshard.Dims(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, seq=4096)
H100 = DEVICES["h100"]
WIDTH = 256


class LoRA(nn.Module):
    """A frozen matrix with two small trained ones."""

    def __init__(self, rank=8):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, rank, bias=False)
        self.up = nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def lora(trains_all=False):
    with torch.device("meta"):
        model = nn.Sequential(*[LoRA() for _ in range(3)], nn.Linear(WIDTH, WIDTH))
    model[-1].requires_grad_(False)
    return model.requires_grad_(True) if trains_all else model


@functools.cache
def workload_of_lora(trains_all):
    """Return the same one to all tests, with the traces that were made of it."""

    def step(model, samples):
        return model(torch.zeros(samples, WIDTH)).square().mean()

    return Workload(lora(trains_all), step, 1, "samples", traces={})


def of_lora(ranks=4, transport="nccl", per_host=None, trains_all=False, **way):
    network = Network(450, 400, per_host or ranks)
    cluster = Cluster(H100, ranks, network, transport)
    return predict(workload_of_lora(trains_all), Way(**{"precision": "fp32", **way}), cluster)


def durations_of(workload, ranks, gpu="h100", **way):
    """Return the seconds of a step's parts."""
    wrapped = Wrapped(workload, Way(**way), Cluster(DEVICES[gpu], ranks, Network(450, 400, ranks)))
    traced = workload.traced(wrapped.modules, 1, "", None)
    return Costs(wrapped, {}).durations(traced)


def step_seconds(prediction):
    return prediction.seconds - prediction.timeline.seconds


# --- memory ---------------------------------------------------------------------------------------

AT_THE_PEAK = {"grads", "activations", "total"}  # a plan says which gradients are there then


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "sgd", None])
@pytest.mark.parametrize("offload", [None, Offload(), Offload(grads=True, fraction=0.5)])
@pytest.mark.parametrize("strategy", ["full_shard", "zero1", "no_shard"])
def test_parts_are_those_of_predict_memory(strategy, offload, optimizer):
    on_disk = offload and dataclasses.replace(offload, directory="/nowhere")
    options = {"strategy": strategy, "optimizer": optimizer}
    predicted = predict_memory(lora(), 4, transport="c10d", offload=on_disk, **options)
    memory = of_lora(transport="c10d", offload=offload, **options).memory
    assert {part: memory[part] for part in predicted.keys() - AT_THE_PEAK} == {
        part: predicted[part] for part in predicted.keys() - AT_THE_PEAK
    }
    assert 0 <= memory["grads"] <= predicted["grads"]
    assert memory["total"] == sum(memory.values()) - memory["total"] - memory["offloaded"]


def test_frozen_parameters_have_no_gradients_and_no_state():
    frozen, whole = of_lora(), of_lora(trains_all=True)
    trained, total = (
        sum(p.numel() for p in lora(trains_all).parameters() if p.requires_grad)
        for trains_all in (False, True)
    )
    assert frozen.memory["optimizer"] == 2 * 4 * trained / 4  # over four ranks
    assert frozen.memory["shards"] == whole.memory["shards"]
    assert frozen.memory["buckets"] < 0.1 * whole.memory["buckets"]
    ratio = step_seconds(frozen) / step_seconds(whole)
    assert ratio == pytest.approx(trained / total, rel=0.05)  # but for padding
    some, every = (
        durations_of(workload_of_lora(trains_all), 4, precision="fp32").reduce
        for trains_all in (False, True)
    )
    assert sum(some) < sum(every)


# --- bytes and time between ranks -----------------------------------------------------------------


def test_bytes_by_hand():
    # over 4 hosts of 8: each host's ranks together receive (1 - 1/32) of a ring from others
    assert ring(320.0, 32, 8) == Traffic(310 * 7 / 8, 310 / 8)
    assert ring(320.0, 8, 8) == Traffic(280.0, 0.0)
    assert ring(320.0, 1, 8) == Traffic(0.0, 0.0)
    assert swap(10.0, 32, 8) == Traffic(70.0, 240.0)
    assert swap(10.0, 4, 1) == Traffic(0.0, 30.0)
    assert swap_by_host(10.0, 5.0, 32, 8) == Traffic(280.0, 15.0)


def test_an_exchange_takes_the_slower_of_both_links():
    network = Network(link=300, nic=400, per_host=8)
    inside, between = Traffic(1e9, 0.0), Traffic(0.0, 1e9)
    assert exchange(network, inside, 8) == pytest.approx(1e9 / 240e9, rel=0.01)
    # eight ranks share 42.5 GB/s
    assert exchange(network, between, 16) == pytest.approx(8e9 / 42.5e9, rel=0.01)
    both = exchange(network, Traffic(1e9, 1e9), 16)
    assert both == exchange(network, between, 16)
    assert exchange(network, Traffic(), 16) == exchange(network, inside, 1) == 0
    gathers = [gather(network, 1e9, ranks) for ranks in (1, 8, 16)]
    assert gathers == pytest.approx([0, 1e9 * 7 / 8 / 240e9, 1e9 * 15 / 16 / 42.5e9], rel=0.02)
    assert all_reduce(network, 1e9, 1) == 0
    assert all_reduce(network, 1e9, 2) > gathers[2]


@pytest.mark.parametrize("strategy", ["full_shard", "zero1", "no_shard", "hybrid_shard"])
@pytest.mark.parametrize("trains_all", [False, True])
def test_codes_save_bytes_between_hosts_only(strategy, trains_all):
    def of(wire, per_host):
        way = {"strategy": strategy, "wire": wire, "precision": "bf16"}
        return of_lora(8, per_host=per_host, trains_all=trains_all, **way)

    none, coded = (of(wire, 4) for wire in (Wire(), Wire("bf16", "bf16")))
    assert coded.traffic.hosts < none.traffic.hosts
    assert coded.memory["transport"] > none.memory["transport"]  # what codes lose is kept
    one_host = [of(wire, 8) for wire in (Wire(), Wire("bf16", "bf16"))]
    assert one_host[0]._replace(way=None) == one_host[1]._replace(way=None)


@pytest.mark.thorough
def test_codes_are_faster_over_a_slow_network():
    none, coded = (
        zshard.plan(LARGE, 32, "h100", nic=100, batch=32, wire=wire, strategies=["full_shard"])
        for wire in (None, "bf16")
    )
    assert coded.best.tokens_per_s > 1.5 * none.best.tokens_per_s
    assert 'wire="bf16"' in coded.line() and "wire 'bf16'" in str(coded)


# --- the optimizer's step -------------------------------------------------------------------------

MEMORY = H100.bandwidth * 1e12 * H100.move


@pytest.mark.parametrize(
    ("optimizer", "each", "each_of_few"),
    [
        ("adamw", 32, 32),  # p, m, v read and written, the gradient read twice
        ("sgd", 16, 16),
        (1, 24, 24),
        ("adamw8bit", 16 + 4 * 33 / 32, 32),  # small tensors keep moments in float32
        (None, 0, 0),
    ],
)
def test_a_step_moves_its_bytes(optimizer, each, each_of_few):
    prediction = of_lora(1, strategy="no_shard", trains_all=True, optimizer=optimizer)
    sizes = [p.numel() for p in lora().parameters()]
    expected = sum(size * (each_of_few if size < 4096 else each) for size in sizes)
    assert step_seconds(prediction) == pytest.approx(expected / MEMORY, rel=1e-3)


def test_a_step_with_a_16_bit_copy_and_offload():
    n = 1 << 20
    here, there = (Held(4 * n, 4 * n, 2 * n, (moves, False)) for moves in (False, True))
    grads = Held(4 * n, 4 * n, 2 * n, (True, True))
    assert update_seconds([here], 8 * n, 0, H100) == pytest.approx(34 * n / MEMORY)
    # read: parameters by the step and the cast, and state; written: both, and the copy
    assert update_seconds([there], 8 * n, 8 * n, H100) == pytest.approx(16 * n / 50e9)
    assert update_seconds([grads], 8 * n, 8 * n, H100) == pytest.approx(24 * n / 50e9)
    assert update_seconds([here], 8 * n, 8 * n, H100) == pytest.approx(8 * n / 50e9)


# --- offload --------------------------------------------------------------------------------------


def test_offloading_takes_time_and_frees_memory():
    none, params, all_parts = (
        zshard.plan(LARGE, 8, "h100", batch=8, offload=offload, strategies=["full_shard"]).best
        for offload in (False, True, Offload(grads=True))
    )
    assert none.seconds < params.seconds < all_parts.seconds
    assert none.memory["offloaded"] == 0
    assert params.memory["shards"] == params.memory["optimizer"] == 0
    assert all_parts.memory["grads"] == 0 < params.memory["offloaded"]


def test_shards_and_gradients_cross_the_link_to_the_host():
    def of(what, offload):
        offload = Offload.of(offload).on("cuda")
        return getattr(durations_of(decoder(LARGE), 2, "h200", offload=offload), what)[9]

    width, kv, ffn = LARGE.width, LARGE.width // 4, LARGE.ffn
    block = 2 * width * width + 2 * width * kv + 3 * width * ffn + 2 * width
    assert of("gather", True) == pytest.approx(2 * block / 2 / 50e9)
    assert of("gather", Offload(params=False)) < 0.2 * of("gather", True)
    more = of("reduce", Offload(grads=True)) - of("reduce", True)
    assert more == pytest.approx(4 * block / 2 / 50e9)


def test_unsharded_parameters_are_read_from_the_host_at_each_use():
    whole = 4 * sum(p.numel() for p in lora().parameters())
    seconds = [
        of_lora(1, strategy="no_shard", offload=offload, optimizer=None).seconds
        for offload in (None, Offload(optimizer=False))
    ]
    # the last unit stays from forward to backward, and the first needs no gradient of its input
    assert whole / 50e9 < seconds[1] - seconds[0] <= 2 * whole / 50e9


def test_offload_is_tried_where_nothing_fits():
    plan = zshard.plan(LARGE, 2, "rtx-4090", batch=2)
    fitting = [each for each in plan.predictions if plan.fits(each)]
    assert fitting and all(each.way.offload for each in fitting)
    assert any(each.way.offload is None for each in plan.predictions)
    assert "full_shard, offload" in str(plan) and "in its host's memory" in str(plan)
    never = zshard.plan(LARGE, 2, "rtx-4090", batch=2, offload=False)
    assert never.best is None and not any(each.way.offload for each in never.predictions)
    assert "Nothing fits into 22 GiB: the least is" in str(never)
    with pytest.raises(ValueError, match="nothing fits"):
        never.line()


@pytest.mark.parametrize(
    ("offload", "wire"),
    [
        (True, None),
        (Offload(grads=True), "bf16"),
        (Offload(params=False, fraction=0.25), Wire(gradients="bf16")),
        (CPUOffload(offload_params=True), Wire(parameters="bf16")),
    ],
    ids=["all", "gradients, too", "a part", "by FSDP1's class"],
)
def test_the_line_has_offload_and_wire(offload, wire):
    plan = zshard.plan(DIMS, 16, "h100", batch=16, offload=offload, wire=wire)
    calls = []
    names = {"MixedPrecision": MixedPrecision, "Offload": Offload, "Wire": Wire, "torch": torch}
    eval(plan.line(), {**names, "FSDP": lambda *_, **k: calls.append(k), "model": None})
    (given,) = calls
    way = plan.best.way
    assert Offload.of(given["offload"]) == way.offload
    assert Wire.of(given.get("wire")) == way.wire
    assert json.loads(plan.to_json())["ways"][0]["wire"] == dataclasses.asdict(way.wire)
