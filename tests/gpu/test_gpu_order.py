"""The GPU's path as its stand-ins saw it: what streams wait for, what is allocated when, what is held.

The one idea: the numbers of a run can be right by luck; its log says what is sure (gpu_log.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import gpu_log
import pytest
import stand_ins
import torch
from nursery import fork_ranks
from torch import nn

import zshard
from zshard import FSDP

STEPS = 3
BF16 = zshard.MixedPrecision(torch.bfloat16)
GATHER, REDUCE = 1, 2  # numbers of the streams, in the order in which they are made
ALLOCATIONS = {"cuMemAlloc", "cuMemHostAlloc", "cuMemHostRegister", "cuStreamCreateWithPriority"}
ALLOCATIONS |= {"cuMemFree", "cuMemFreeHost", "cuEventCreate", "MemAlloc", "MemFree"}


class MarkedProduct(torch.autograd.Function):
    """x @ weight, which tells the log when it reads the weight."""

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


def train(folder, env, options):
    """Where the log is, the memory that is held and was predicted, and the losses."""
    os.environ.update(env)
    rank = int(os.environ["RANK"])
    log = gpu_log.start(folder, rank)
    torch.manual_seed(3)
    policy = zshard.wrap.ModuleWrapPolicy({Layer})
    model = FSDP(nn.Sequential(*(Layer() for _ in range(4))), auto_wrap_policy=policy, **options)
    optimizer = zshard.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        gpu_log.mark("step", number=step)
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(4, 48)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    gpu_log.mark("step", number=STEPS)
    gpu_log.stop()
    return log, model.memory("now"), model.memory("predicted"), losses


STRATEGIES = ["full_shard", "shard_grad_op", "zero1", "no_shard"]
RUNS = [(strategy, precision) for strategy in STRATEGIES for precision in (None, BF16)]
NAMES = [f"{strategy}-{'bf16' if precision else 'fp32'}" for strategy, precision in RUNS]


@pytest.fixture(scope="module", params=RUNS, ids=NAMES)
def run(request, tmp_path_factory):
    """The strategy, its precision, and what each of two ranks had."""
    strategy, precision = request.param
    options = {"strategy": strategy, "mixed_precision": precision, "transport": "c10d"}
    folder = str(tmp_path_factory.mktemp("logs"))
    results = fork_ranks(train, 2, folder, stand_ins.environment("nccl"), options, check=True)
    return strategy, precision, [result.value for result in results]


def lines_of(run) -> list[list[gpu_log.Line]]:
    return [gpu_log.read(Path(log)) for log, *_ in run[2]]


def test_nothing_races(run):
    for lines in lines_of(run):
        assert gpu_log.races(lines) == []


def test_what_should_be_in_the_log_is(run):
    """Else there would be nothing to race."""
    strategy, *_ = run
    gathers = strategy in ("full_shard", "shard_grad_op")
    for lines in lines_of(run):
        steps = gpu_log.order_of(lines).steps
        count = {
            what: sum(what in step.name and step.stream == stream for step in steps)
            for what, stream in (("sum", REDUCE), ("Send", REDUCE), ("adam", 0), ("torch", 0))
        }
        assert count["sum"] >= STEPS * 4 and count["Send"] >= STEPS * 4 and count["adam"] >= STEPS
        assert count["torch"] == STEPS * 4 * 2  # forward and backward
        if gathers:
            assert sum(s.name == "AllGather" and s.stream == GATHER for s in steps) >= STEPS * 4


def test_a_forgotten_wait_would_be_seen(run):
    """Without the waits of any one stream for another there are races, so the check can fail."""
    strategy, *_ = run
    lines = lines_of(run)[0]
    streams = [0, REDUCE] if strategy in ("no_shard", "zero1") else [0, GATHER, REDUCE]
    for stream in streams:
        without = [
            (name, fields)
            for name, fields in lines
            if not (name == "cuStreamWaitEvent" and fields["stream"] == str(stream))
        ]
        assert len(without) < len(lines) and gpu_log.races(without), stream


def test_side_streams_fork_from_and_join_torchs_within_a_step(run):
    """As a graph of a whole step (CUDA graphs) would need it."""
    for lines in lines_of(run):
        order, start = gpu_log.Order(), None
        for number, (name, fields) in enumerate(lines):
            if name == "step":
                known = order.known.setdefault(0, {})
                for stream, count in order.counts.items():
                    assert known.get(stream, 0) == count, (fields, stream, "is not joined")
                start = dict(order.counts)
            before = len(order.steps)
            order.add(number, name, fields)
            for step in order.steps[before:]:
                if start is not None and step.stream != 0:
                    assert step.before.get(0, 0) >= start[0], (step, "is not forked")


def test_nothing_is_allocated_after_the_first_step(run):
    for lines in lines_of(run):
        first = next(i for i, line in enumerate(lines) if line == ("step", {"number": "1"}))
        late = [line for line in lines[first:] if line[0] in ALLOCATIONS]
        assert late == []


def test_what_is_held_is_what_was_predicted(run):
    for _, now, predicted, _ in run[2]:
        assert now == predicted
