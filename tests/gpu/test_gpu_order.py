"""Waits of streams, times of allocations, memory held: from the fakes' log of calls.

The numbers of a run can be right by luck; its log proves the order (gpu_log.py).
"""

from __future__ import annotations

import ctypes
import os

import gpu_log
import pytest
import torch
from gpus import FAKE, on_device, on_fakes
from torch import nn

import zshard
from zshard import FSDP

STEPS = 3
BF16 = zshard.MixedPrecision(torch.bfloat16)
GATHER, REDUCE = 1, 2  # numbers of the streams, in the order in which they are made
ALLOCATIONS = {"cuMemAlloc", "cuMemHostAlloc", "cuStreamCreateWithPriority"}
ALLOCATIONS |= {"cuMemFree", "cuMemFreeHost", "cuEventCreate"}


class MarkedProduct(torch.autograd.Function):
    """x @ weight, which logs when it reads the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        gpu_log.mark_use(weight, "src")
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        gpu_log.mark_use(weight, "src")
        return grad @ weight.t(), x.t() @ grad


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, 48) / 7)

    def forward(self, x):
        return torch.tanh(MarkedProduct.apply(x, self.weight))


class SomeLayers(nn.Sequential):
    """Each rank leaves out a layer in each step, and another one than its neighbor."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.calls = 0

    def forward(self, x):
        left_out = (self.calls + int(os.environ["RANK"])) % len(self)
        self.calls += 1
        for number, layer in enumerate(self):
            x = layer(x) if number != left_out else x
        return x


def train(folder, options, kind=nn.Sequential):
    """The place of the log, and the held and the predicted memory."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(3)
    with gpu_log.written(folder) as log:
        policy = zshard.wrap.ModuleWrapPolicy({Layer})
        model = FSDP(kind(*(Layer() for _ in range(4))), auto_wrap_policy=policy, **options)
        optimizer = zshard.AdamW(model.parameters(), lr=0.01)
        for step in range(STEPS):
            gpu_log.mark("step", number=step)
            torch.manual_seed(10 * step + rank)
            model(torch.randn(4, 48)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        gpu_log.mark("step", number=STEPS)
    return log, model.memory("peak"), model.memory("predicted")


def late_allocations(lines):
    """Those after the second step: the first does not know the order of units, and prefetches less."""
    second = lines.index(("step", {"number": "2"}))
    return [line for line in lines[second:] if line[0] in ALLOCATIONS]


def assert_waits_are_found(lines, streams):
    """Without the waits of any one stream for others there are races, so the check can fail."""
    assert gpu_log.races(lines) == []
    for stream in streams:
        assert gpu_log.races(gpu_log.without_waits(lines, stream)), stream


STRATEGIES = ["full_shard", "shard_grad_op", "zero1", "no_shard"]
RUNS = [(strategy, precision) for strategy in STRATEGIES for precision in (None, BF16)]
NAMES = [f"{strategy}-{'bf16' if precision else 'fp32'}" for strategy, precision in RUNS]


@pytest.fixture(scope="module", params=RUNS, ids=NAMES)
def run(request, tmp_path_factory):
    """The strategy, and each of two ranks' log, and memory."""
    strategy, precision = request.param
    options = {"strategy": strategy, "mixed_precision": precision, "transport": "c10d"}
    ranks = on_fakes(train, 2, str(tmp_path_factory.mktemp("logs")), options)
    return strategy, [(gpu_log.read(log), *memory) for log, *memory in ranks]


# --- several streams of torch's ------------------------------------------------------------------


class OnStream(torch.autograd.Function):
    """x; what comes later in forward, or behind this in backward, has another current stream."""

    @staticmethod
    def forward(ctx, x, streams, forward, backward):
        ctx.streams, ctx.backward_to = streams, backward
        set_stream(streams[forward])
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        set_stream(ctx.streams[ctx.backward_to])
        return grad, None, None, None


class Plain(nn.Linear):
    """A unit of whose reading the log says nothing: its stream is not known."""


class Branches(nn.Module):
    """Two layers that each get their gradient in a separate stream."""

    def __init__(self, streams: list[int]) -> None:
        super().__init__()
        self.left, self.right, self.streams = nn.Linear(48, 48), nn.Linear(48, 48), streams

    def forward(self, x):
        left = OnStream.apply(self.left(x), self.streams, 0, 1)
        return left + OnStream.apply(self.right(x), self.streams, 0, 2)


def set_stream(handle):
    """Make this torch's current stream of models on the CPU."""
    driver = ctypes.CDLL(os.environ["ZSHARD_CUDA_LIB"])
    driver.fake_cuda_set_host_stream(ctypes.c_void_p(handle))


def torch_streams(count):
    """The default stream, and more for torch, which are numbered in the log from 1 on."""
    driver = ctypes.CDLL(os.environ["ZSHARD_CUDA_LIB"])
    driver.fake_cuda_torch_stream.restype = ctypes.c_void_p
    return [0, *(driver.fake_cuda_torch_stream() for _ in range(count))]


@on_device(2, "nccl", fresh=True, kinds=FAKE)
def test_round_waits_for_gradients_of_all_streams(tmp_path):
    """A round is posted in the stream of its last gradient; the others come from other streams."""
    with gpu_log.written(str(tmp_path)) as log:
        streams = torch_streams(2)
        policy = zshard.wrap.ModuleWrapPolicy({Branches, Plain})
        model = nn.Sequential(Plain(48, 48), Branches(streams), Plain(48, 48), Plain(48, 48))
        model = FSDP(model, auto_wrap_policy=policy)
        for _ in range(3):
            set_stream(0)
            model(torch.randn(4, 48)).square().mean().backward()
            model.zero_grad()
    lines = gpu_log.read(log)
    packed = {step.stream for step in gpu_log.order_of(lines).steps if "cuMemcpy" in step.name}
    assert {1, 2} <= packed
    assert gpu_log.races(lines) == []


class Reader(nn.Module):
    """A layer that logs the stream in which it reads its weight."""

    def __init__(self, now: list[int]) -> None:
        super().__init__()
        self.weight, self.now = nn.Parameter(torch.randn(48, 48) / 7), now

    def forward(self, x):
        gpu_log.mark_use(self.weight, "src", self.now[0])
        return x @ self.weight


@on_device(2, "nccl", fresh=True, kinds=FAKE)
def test_forward_in_another_stream_waits_for_the_last_one(tmp_path):
    """It takes slots that the one before may still read, unknown to torch."""
    with gpu_log.written(str(tmp_path)) as log:
        streams, now = torch_streams(2), [0]
        policy = zshard.wrap.ModuleWrapPolicy({Reader})
        model = FSDP(nn.Sequential(*(Reader(now) for _ in range(4))), auto_wrap_policy=policy)
        for stream in (0, 1, 2, 0, 2):
            now[0] = stream
            set_stream(streams[stream])
            with torch.no_grad():
                model(torch.randn(4, 48))
    assert gpu_log.races(gpu_log.read(log)) == []


@on_device(2, "nccl", fresh=True, kinds=FAKE)
def test_codes_between_hosts_race_with_nothing(tmp_path):
    """Codes of parameters are written in the gather stream, those of gradients in that of rounds."""
    os.environ["ZSHARD_HOST"] = f"host {os.environ['RANK']}"
    options = {"transport": "c10d", "wire": "bf16", "keep_gathered": False}
    log, peak, predicted = train(str(tmp_path), options)
    lines = gpu_log.read(log)
    steps = gpu_log.order_of(lines).steps
    for kernel, stream in (
        ("zs_cast_f32_bf16", GATHER),
        ("zs_cast_bf16_f32", GATHER),
        ("zs_encode", REDUCE),
        ("zs_cast_bf16_f32", REDUCE),
    ):
        assert sum(kernel in step.name and step.stream == stream for step in steps) >= STEPS * 4
    assert gpu_log.races(lines) == []
    assert late_allocations(lines) == []
    assert peak == predicted


@on_device(2, "nccl", fresh=True, kinds=FAKE)
def test_gathers_of_units_left_out_race_with_nothing(tmp_path):
    """A gather for others alone goes to the memory of rounds, in another stream."""
    options = {"transport": zshard.NcclOptions(any_order=True)}
    log, *_ = train(str(tmp_path), options, SomeLayers)
    assert_waits_are_found(gpu_log.read(log), (0, GATHER, REDUCE))


def test_nothing_races(run):
    strategy, ranks = run
    for lines, *_ in ranks:
        streams = [0, REDUCE] if strategy in ("no_shard", "zero1") else [0, GATHER, REDUCE]
        assert_waits_are_found(lines, streams)


def test_side_streams_fork_and_join_within_a_step(run):
    """As a graph of a whole step (CUDA graphs) would need it."""
    for lines, *_ in run[1]:
        order, start = gpu_log.Order(), None
        for number, (name, fields) in enumerate(lines):
            if name == "step":
                assert gpu_log.unjoined(order) == set(), fields
                start = order.counts.get(0, 0)
            before = len(order.steps)
            order.add(number, name, fields)
            for step in order.steps[before:]:
                if start is not None and step.stream != 0:
                    assert step.before.get(0, 0) >= start, (step, "is not forked")


def test_memory_is_as_predicted_and_constant(run):
    for lines, peak, predicted in run[1]:
        assert peak == predicted
        assert late_allocations(lines) == []
