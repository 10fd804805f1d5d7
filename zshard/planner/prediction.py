"""One way to train a model on a cluster, and its predicted step: memory and time of a rank."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from zshard import _core
from zshard.memory.dry_run import World
from zshard.memory.fits import parse_keep
from zshard.memory.report import dry_run_of
from zshard.offload import Offload, offload_on
from zshard.planner.durations import Compute
from zshard.planner.gpus import GIB, Device, Network
from zshard.planner.kernels import Segment, Traced
from zshard.planner.measured import UNITS, Exchange, FsdpArgs, Idle, Machine, idle_model
from zshard.planner.modelled import Modelled
from zshard.planner.timeline import Durations, Timeline, play
from zshard.planner.traffic import Traffic
from zshard.planner.workloads import Workload
from zshard.precision import MixedPrecision, precision_of
from zshard.ranks.wire import Wire
from zshard.strategy import strategy_of
from zshard.units.units import Options, Prefetch

COMPILED = 0.8
"""Part of the activations that is left with torch.compile, which computes some of them again."""

PRECISIONS = ("bf16", "fp32", "fp8")


class Cluster(NamedTuple):
    """The hardware: one rank per GPU. transport: between all ranks: "nccl", "shm", "hosts" or
    "c10d". machine: measures durations, in place of the data sheets'; None: it is not at hand.
    reduces_by_ring: gradients are reduced by NCCL's rings, as by torch's FSDP, not as by zshard.
    """

    device: Device
    ranks: int
    network: Network
    transport: str = "nccl"
    machine: Machine | None = None
    reduces_by_ring: bool = False

    @classmethod
    def of(cls, machine: Machine) -> Cluster:
        """Return the cluster of the ranks at hand. Collective."""
        device = Device(machine.room() / GIB, *[0] * 11)
        network = Network(0, 0, machine.per_host)
        return cls(device, machine.ranks, network, machine.transport, machine)

    def group_of(self, way: Way) -> int:
        """Return how many ranks a hybrid strategy shards over."""
        return way.group or min(self.network.per_host, self.ranks)

    def world(self, group: int) -> World:
        """Return the ranks for FSDP, with shard groups of that size."""
        inside = "shm" if self.transport == "hosts" else self.transport
        per_host = self.network.per_host
        several = self.ranks > per_host and self.ranks % per_host == 0
        return World(self.ranks, group, self.transport, inside, per_host if several else 0)


class Way(NamedTuple):
    """What a user decides.

    strategy: as for FSDP. group: ranks that a hybrid strategy shards over; 0: those of a host.
    precision: "fp32"; "bf16": computes, gathers and reduces in it, state in float32; "fp8": the
    same with matmuls in fp8. checkpointing: of activations: "", "selective", "alternate" or "full".
    micro_batch: samples of a rank. accumulate: micro-batches in a step. compiled: by torch.compile. attention:
    "flash", or "triton" for Triton's of 2023. optimizer: as for predict_memory(). offload, wire: as
    for FSDP.
    """

    strategy: str = "full_shard"
    group: int = 0
    precision: str = "bf16"
    checkpointing: str = ""
    micro_batch: int = 1
    accumulate: int = 1
    compiled: bool = False
    attention: str = "flash"
    optimizer: str | int | None = "adamw"
    offload: Offload | None = None
    wire: Wire = Wire()


class Prediction(NamedTuple):
    """A step of a rank.

    seconds: of the step. memory: bytes at the peak by part, with
    "activations" and "total". flops: that the model needs, without recomputation; causal attention
    counts half. tokens: of the rank. traffic: bytes that the rank receives in the step. timeline:
    of one micro-batch. units: their names, as in a trace.
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
    """Predict a step. Raises what FSDP raises for the way, and what the model raises;
    NotImplementedError for offload and wire codes on the machine at hand."""
    if cluster.machine is not None and (way.offload is not None or way.wire != Wire()):
        raise NotImplementedError(
            "offload and wire are not measured: omit them, or plan for a GPU of the list"
        )
    wrapped = _Wrapped(workload, way, cluster)
    dtype = None if way.precision == "fp32" else torch.bfloat16
    traced = workload.traced(wrapped.modules, way.micro_batch, way.checkpointing, dtype)
    memory = wrapped.memory(traced)
    timeline = wrapped.timeline(traced)
    times = way.accumulate
    return Prediction(
        way,
        times * (timeline.seconds + wrapped.copy_seconds()) + wrapped.optimizer_seconds(),
        memory,
        times * traced.flops,
        times * way.micro_batch * workload.tokens,
        wrapped.traffic(times),
        timeline,
        wrapped.names,
    )


class _Wrapped:
    """The units of a model on a cluster, as FSDP would make them."""

    def __init__(self, workload: Workload, way: Way, cluster: Cluster) -> None:
        self._way, self._cluster = way, cluster
        model, options = workload.model, options_of(way)
        self._world = cluster.world(cluster.group_of(way))
        # keep_gathered="auto", with memory to spare
        self._kept = self._world.per_host > 0 and cluster.transport in ("hosts", "c10d")
        self._run = dry_run_of(model, "auto", options, self._world)
        self._modelled = Modelled(self._run, model, way, cluster)
        self._acts: Counter[tuple[str, int]] = Counter()
        found = self._run.in_order
        self._units = [unit for unit, _ in found]
        self.modules = [spec.module for _, spec in found]
        self.names = [unit.name or "root" for unit in self._units]
        self._numel = [sum(ref.param.numel() for ref in spec.params) for _, spec in found]

    # --- time -------------------------------------------------------------------------------------

    def timeline(self, traced: Traced) -> Timeline:
        """Return the timeline of a micro-batch."""
        calls, marks = self._calls(traced)
        self._run.engine.set_calls(calls)
        if self._kept:
            self._run.engine.keep_gathered(sys.maxsize, False)
        events = self._run.engine.predict_events()
        self._acts = Counter(events)
        machine = self._cluster.machine
        if machine is None:
            return play(events, marks, self._by_data_sheets(traced))
        return play(events, marks, self._measured(traced, machine, events))

    def _by_data_sheets(self, traced: Traced) -> Durations:
        way = self._way
        compute = Compute(self._cluster.device, way.precision, way.compiled, way.attention)
        return Durations(
            compute.of_segments(traced.forward),
            compute.of_segments(traced.backward),
            traced.owners,
            [self._modelled.gather(i) for i in range(len(self._units))],
            [self._modelled.reduce(i) for i in range(len(self._units))],
        )

    def _measured(
        self, traced: Traced, machine: Machine, events: Sequence[tuple[str, int]]
    ) -> Durations:
        exchange = self._exchange(machine)
        gathers = [exchange.gather.at(numel) for numel in self._numel]
        reduces = [exchange.reduce.at(size.numel) for size in self._modelled.sizes]
        forward = machine.of_segments(traced.forward)
        if not any(act == "gather" for act, _ in events):  # a forward has its other costs still
            for mark, (at, begins) in enumerate(traced.marks):
                forward[mark + 1] += gathers[at].seconds if begins else 0.0
        return Durations(
            forward,
            machine.of_segments(traced.backward),
            traced.owners,
            [cost.seconds for cost in gathers],
            [cost.seconds for cost in reduces],
            {
                "gather": [cost.work for cost in gathers],
                "reduce": [cost.work for cost in reduces],
            },
        )

    def _exchange(self, machine: Machine) -> Exchange:
        way, kept = self._way, self._kept
        args = FsdpArgs(way.strategy, way.precision, way.optimizer, kept)
        return machine.exchange(args, lambda: _gathered_again(options_of(way), self._world, kept))

    def _calls(self, traced: Traced) -> tuple[list[tuple[_core.Unit, int]], dict[int, int]]:
        """Return the calls of the forward that was traced, and the marks by the index of a call."""
        calls: list[tuple[_core.Unit, int]] = []
        marks: dict[int, int] = {}
        entered: set[int] = set()
        for mark, (at, begins) in enumerate(traced.marks):
            unit = self._units[at]
            if begins and at not in entered:
                entered.add(at)  # before the unit, so its gradients come after all of its backward
                calls += [(unit, i) for i in range(unit.n_params)]
            marks[len(calls)] = mark
            calls.append((unit, -1 if begins else -2))
        return calls, marks

    def copy_seconds(self) -> float:
        """See Modelled.copy_seconds."""
        return self._modelled.copy_seconds(self._acts)

    def traffic(self, times: int) -> Traffic:
        """Return the bytes that a rank receives in a step of so many micro-batches."""
        return self._modelled.traffic(self._acts, times)

    def optimizer_seconds(self) -> float:
        """Return how long the optimizer's step takes, and what follows it."""
        machine = self._cluster.machine
        if machine is None:
            return self._modelled.optimizer_seconds()
        return self._exchange(machine).step.at(self._trained()).seconds

    def _trained(self) -> int:
        return sum(size.numel for size in self._modelled.sizes)

    # --- memory -----------------------------------------------------------------------------------

    def memory(self, traced: Traced) -> dict[str, int]:
        """Return the bytes of each part at the peak of a step.

        Gradients grow while activations shrink: the peak is in a forward or a backward.
        """
        parts = self._run.predict()
        del parts["total"]
        peak, grads = self._peak(traced, parts["grads"])
        parts["offloaded"] += self._modelled.offloaded
        parts.update(grads=grads, optimizer=self._modelled.state, activations=peak)
        held = sum(size for part, size in parts.items() if part != "offloaded")
        return {**parts, "total": held}

    def _peak(self, traced: Traced, all_grads: int) -> tuple[int, int]:
        """Return the bytes of activations and of gradients where their sum is largest."""
        kept = self._kept_grads(all_grads)
        found = [(segment.peak, kept) for segment in traced.forward]
        arrived = 0.0
        each = all_grads / max(1, self._trained())
        for mark in range(len(traced.marks), -1, -1):
            segment: Segment = traced.backward[mark]
            grads = min(int(arrived), all_grads)  # a module may run more than once
            found.append((segment.peak, max(grads, kept)))
            if mark > 0 and traced.marks[mark - 1][1]:
                arrived += each * self._modelled.sizes[traced.marks[mark - 1][0]].numel
        found.append((0, all_grads))
        part = COMPILED if self._way.compiled else 1.0
        return max(((int(part * live), grads) for live, grads in found), key=sum)

    def _kept_grads(self, all_grads: int) -> int:
        """Return the bytes of gradients that earlier micro-batches left."""
        return all_grads if self._way.accumulate > 1 else 0


def _gathered_again(options: Options, world: World, kept: bool) -> float:
    """Return how often a backward gathers a unit, in the mean."""
    run = dry_run_of(idle_model(1, torch.device("meta")), {Idle}, options, world)
    if kept:
        run.engine.keep_gathered(sys.maxsize, False)
    acts = [act for act, _ in run.engine.predict_events()]
    return acts[acts.index("backward") :].count("gather") / UNITS


def options_of(way: Way) -> Options:
    """Return the options of FSDP(...) that a way stands for."""
    low = MixedPrecision(param_dtype=torch.bfloat16)
    return Options(
        strategy_of(way.strategy),
        precision_of(None if way.precision == "fp32" else low),
        Prefetch(),
        offload_on(way.offload, "cuda"),
        parse_keep(False, "auto"),
        way.wire,
    )
