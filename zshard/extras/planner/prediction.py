"""One way to train a model on a cluster, and its predicted step: memory and time of a rank."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from zshard.extras.planner.costs import Costs
from zshard.extras.planner.timeline import Timeline, play
from zshard.extras.planner.traffic import Traffic
from zshard.extras.planner.ways import Cluster, Way
from zshard.extras.planner.workloads import Workload
from zshard.extras.planner.wrapped import Wrapped


class Prediction(NamedTuple):
    """A step of a rank.

    seconds: of the step. memory: bytes at the peak by part, with "activations" and "total". flops:
    that the model needs, without recomputation; causal attention counts half. tokens: of the rank.
    traffic: bytes that the rank receives in the step. timeline: of one micro-batch. units: the
    names of those that it numbers.
    """

    way: Way
    seconds: float
    memory: dict[str, int]
    flops: float
    tokens: int
    traffic: Traffic
    timeline: Timeline
    units: list[str]

    @property
    def tokens_per_s(self) -> float:
        """Tokens (or samples) per second of a GPU."""
        return self.tokens / self.seconds

    @property
    def tflops(self) -> float:
        """TFLOP/s of a GPU."""
        return self.flops / self.seconds / 1e12

    @property
    def exposed(self) -> float:
        """The part of the step in which kernels wait for communication."""
        waiting = sum(self.timeline.exposed.values())
        return self.way.accumulate * waiting / self.seconds


def predict(workload: Workload, way: Way, cluster: Cluster) -> Prediction:
    """Predict a step. Raises what FSDP raises for the way, and what the model raises."""
    wrapped = Wrapped(workload, way, cluster)
    dtype = None if way.precision == "fp32" else torch.bfloat16
    traced = workload.traced(wrapped.modules, way.micro_batch, way.checkpointing, dtype)
    memory = wrapped.memory(traced)
    events, marks = wrapped.schedule(traced)
    costs = Costs(wrapped, Counter(events))
    timeline = play(events, marks, costs.durations(traced))
    times = way.accumulate
    return Prediction(
        way,
        times * (timeline.seconds + costs.copy_seconds()) + costs.step_seconds(),
        memory,
        times * traced.flops,
        times * way.micro_batch * workload.tokens,
        costs.traffic(times),
        timeline,
        wrapped.names,
    )
