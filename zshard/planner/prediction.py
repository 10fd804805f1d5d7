"""One way to train a model on a cluster, and its predicted step: memory and time of a rank."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from zshard import _core
from zshard.memory.dry_run import World
from zshard.memory.fits import parse_keep
from zshard.memory.report import dry_run_of, size_of_state
from zshard.offload import Offload, offload_on
from zshard.planner.durations import Compute, all_reduce, exchange, gather
from zshard.planner.gpus import Device, Network
from zshard.planner.kernels import Segment, Traced
from zshard.planner.timeline import Durations, Timeline, play
from zshard.planner.traffic import CODE_BYTES, Traffic, ring, swap, swap_by_host
from zshard.planner.update import (
    Part,
    matrices_of,
    orthogonalize_seconds,
    orthogonalize_traffic,
    update_seconds,
)
from zshard.planner.workloads import Workload
from zshard.precision import MixedPrecision, precision_of
from zshard.ranks.wire import Wire
from zshard.strategy import ShardingStrategy, strategy_of
from zshard.units.units import Options, Prefetch
from zshard.wrap.tree import UnitSpec

COMPILED = 0.8
"""Part of the activations that is left with torch.compile, which computes some of them again."""

PRECISIONS = ("bf16", "fp32", "fp8")


class Cluster(NamedTuple):
    """The hardware: one rank per GPU.

    transport: between all ranks: "nccl", "shm", "hosts" or "c10d". reduces_by_ring: gradients are
    reduced by NCCL's rings, as torch's FSDP does, and not as zshard does.
    """

    device: Device
    ranks: int
    network: Network
    transport: str = "nccl"
    reduces_by_ring: bool = False


class Way(NamedTuple):
    """What a user decides.

    strategy: as for FSDP. group: ranks that a hybrid strategy shards over; 0: those of a host.
    precision: "fp32"; "bf16": computes, gathers and reduces in it, state in float32; "fp8": the
    same with matmuls in fp8. checkpointing: of activations: "", "selective" or "full". micro_batch:
    samples of a rank. accumulate: micro-batches in a step. compiled: by torch.compile. attention:
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
    of one micro-batch.
    """

    way: Way
    seconds: float
    memory: dict[str, int]
    flops: float
    tokens: int
    traffic: Traffic
    timeline: Timeline

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
    wrapped = _Wrapped(workload, way, cluster)
    dtype = None if way.precision == "fp32" else torch.bfloat16
    traced = workload.traced(wrapped.modules, way.micro_batch, way.checkpointing, dtype)
    timeline = wrapped.timeline(traced)
    times = way.accumulate
    return Prediction(
        way,
        times * (timeline.seconds + wrapped.copy_seconds()) + wrapped.optimizer_seconds(),
        wrapped.memory(traced),
        times * traced.flops,
        times * way.micro_batch * workload.tokens,
        wrapped.traffic(times),
        timeline,
    )


class _Over(NamedTuple):
    """How many ranks a strategy's collectives and steps are over.

    gather, reduce: of a unit's parameters and gradients; sums then cross the replicas.
    reduce_passes: 1 to reduce-scatter, 2 to all-reduce. steps: ranks that share the optimizer's
    step. refreshes: copies are gathered anew after it.
    """

    gather: int
    reduce: int
    steps: int
    reduce_passes: int = 1
    refreshes: bool = False


def _over(strategy: ShardingStrategy, group: int, ranks: int) -> _Over:
    if strategy is ShardingStrategy.NO_SHARD:
        return _Over(1, ranks, 1, reduce_passes=2)
    if strategy is ShardingStrategy.ZERO1:
        return _Over(1, ranks, ranks, refreshes=True)
    if strategy is ShardingStrategy.HYBRID_FULL:
        return _Over(group, ranks, ranks, refreshes=True)
    if strategy.is_hybrid:
        return _Over(group, group, group)
    return _Over(ranks, ranks, ranks)


class _Size(NamedTuple):
    """A unit. numel: elements of trained parameters. full: bytes of all parameters as they are
    gathered; grads: of the trained ones' gradients as they are reduced; own: of all parameters in
    their own dtype."""

    numel: int
    full: float
    grads: int
    own: int


class _Wrapped:
    """The units of a model on a cluster, as FSDP would make them."""

    def __init__(self, workload: Workload, way: Way, cluster: Cluster) -> None:
        self._way, self._cluster = way, cluster
        model, options = workload.model, options_of(way)
        ranks, self._per_host = cluster.ranks, cluster.network.per_host
        group = way.group or min(self._per_host, ranks)
        self._over = _over(options.strategy, group, ranks)
        on_hosts = self._per_host if ranks > self._per_host and ranks % self._per_host == 0 else 0
        world = World(ranks, group, cluster.transport, cluster.transport, on_hosts)
        self._run = dry_run_of(model, "auto", options, world)
        size_of = size_of_state(way.optimizer, model)
        self._state = self._run.trained_bytes(False, size_of)
        self._offloaded_state = self._run.trained_bytes(True, size_of)
        self._matrices = matrices_of(model) if way.optimizer == "muon" else []
        found = self._run.in_order
        self._units = [unit for unit, _ in found]
        self.modules = [spec.module for _, spec in found]
        self._sizes = [self._size_of(unit, spec) for unit, spec in found]
        self._parts = [self._part_of(unit, spec) for unit, spec in found]
        self._acts: Counter[tuple[str, int]] = Counter()

    def _size_of(self, unit: _core.Unit, spec: UnitSpec) -> _Size:
        params = [ref.param for ref in spec.params]
        trained = [param for param in params if param.requires_grad]
        full: float = sum(param.numel() * self._itemsize(param) for param in params)
        if unit.is_coded:
            full = sum(param.numel() for param in params) * CODE_BYTES[self._way.wire.parameters]
        grads = sum(param.numel() * self._itemsize(param) for param in trained)
        own = sum(param.numel() * param.itemsize for param in params)
        return _Size(sum(param.numel() for param in trained), full, grads, own)

    def _part_of(self, unit: _core.Unit, spec: UnitSpec) -> Part:
        trained = cast = copy = 0
        for i, ref in enumerate(spec.params):
            numel, itemsize = unit.param(i)["numel"], ref.param.itemsize
            trained += numel * itemsize if ref.param.requires_grad else 0
            if self._itemsize(ref.param) != itemsize:
                cast, copy = cast + numel * itemsize, copy + numel * self._itemsize(ref.param)
        return Part(trained, cast, copy, unit.offloads[:2])

    def _itemsize(self, param: torch.Tensor) -> int:
        """Return the bytes of an element as it is computed with."""
        is_low = self._way.precision != "fp32" and param.is_floating_point()
        return 2 if is_low else param.itemsize

    # --- time -------------------------------------------------------------------------------------

    def timeline(self, traced: Traced) -> Timeline:
        """Return the timeline of a micro-batch."""
        way = self._way
        compute = Compute(self._cluster.device, way.precision, way.compiled, way.attention)
        calls, marks = self._calls(traced)
        self._run.engine.set_calls(calls)
        places = range(len(self._units))
        durations = Durations(
            compute.of_segments(traced.forward),
            compute.of_segments(traced.backward),
            [self._gather(i) for i in places],
            [self._reduce(i) for i in places],
        )
        events = self._run.engine.predict_events()
        self._acts = Counter(events)
        return play(events, marks, durations)

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

    def _gather(self, i: int) -> float:
        over, full = self._over, self._sizes[i].full
        network = gather(self._cluster.network, full, over.gather)
        from_host = self._units[i].offloads[0] and over.gather > 1 and not over.refreshes
        return max(network, self._host_seconds(full / over.gather) if from_host else 0.0)

    def _reduce(self, i: int) -> float:
        cluster, over, size = self._cluster, self._over, self._sizes[i].grads
        network, ranks = cluster.network, cluster.ranks
        if cluster.reduces_by_ring:
            return over.reduce_passes * gather(network, size, over.reduce) + all_reduce(
                network, size / over.reduce, ranks // over.reduce
            )
        seconds = exchange(network, self._swapped(i), ranks)
        if over.reduce_passes == 2:
            seconds += gather(network, size, ranks)
        to_host = self._parts[i].trained if self._units[i].offloads[1] else 0
        return seconds + self._host_seconds(to_host)

    def _host_seconds(self, size: float) -> float:
        return size / (self._cluster.device.host * 1e9)

    def copy_seconds(self) -> float:
        """Return how long the kernels of a micro-batch wait for offloaded parameters that no rank
        shards: each use reads them from the host in the stream of kernels."""
        if self._over.gather > 1 or self._over.refreshes:
            return 0.0
        used = (i for (act, i), n in self._acts.items() if act == "gather" for _ in range(n))
        return self._host_seconds(
            sum(self._sizes[i].own for i in used if self._units[i].offloads[0])
        )

    def optimizer_seconds(self) -> float:
        """Return how long the optimizer's step takes, and the gather after it where copies of the
        parameters stay."""
        network, over, way = self._cluster.network, self._over, self._way
        ranks, device = self._cluster.ranks, self._cluster.device
        seconds = 0.0
        if way.optimizer is not None:
            held = self._state + self._offloaded_state, self._offloaded_state
            seconds = update_seconds(self._parts, *held, device)
        if self._matrices:
            compute = Compute(device, compiled=way.compiled)
            seconds += orthogonalize_seconds(self._matrices, ranks, compute)
            seconds += exchange(network, self._orthogonalized(), ranks)
        if not over.refreshes:
            return seconds
        return seconds + sum(gather(network, each.grads, ranks) for each in self._sizes)

    # --- traffic ----------------------------------------------------------------------------------

    def traffic(self, times: int) -> Traffic:
        """Return the bytes that a rank receives in a step of so many micro-batches, whose timeline
        was made."""
        total = self._orthogonalized() if self._matrices else Traffic()
        ranks, over = self._cluster.ranks, self._over
        for (act, i), n in self._acts.items():
            if act == "gather":
                gathered = ring(self._sizes[i].full, over.gather, self._per_host)
                total = total.plus(gathered, n * times)
            elif act == "post":
                total = total.plus(self._reduced(i), n * times)
        if over.refreshes:  # from the ranks at this one's place in the other groups
            size = sum(each.grads for each in self._sizes) / over.gather
            per_host = max(1, self._per_host // over.gather)
            total = total.plus(ring(size, ranks // over.gather, per_host))
        return total

    def _reduced(self, i: int) -> Traffic:
        size, over, ranks = self._sizes[i].grads, self._over, self._cluster.ranks
        if not self._cluster.reduces_by_ring:
            again = ring(size, ranks, self._per_host) if over.reduce_passes == 2 else Traffic()
            return self._swapped(i).plus(again)
        replicas = ranks // over.reduce
        across = Traffic(0.0, 2 * size / over.reduce * (1 - 1 / replicas))
        return across.plus(ring(size, over.reduce, self._per_host), over.reduce_passes)

    def _swapped(self, i: int) -> Traffic:
        """Return what a rank receives to sum its shard."""
        size, ranks, code = self._sizes[i], self._cluster.ranks, self._way.wire.gradients
        shards = self._over.reduce
        by_host = code is not None or self._cluster.transport == "hosts"
        if by_host and ranks > self._per_host:
            coded = size.numel / shards * CODE_BYTES[code]
            return swap_by_host(size.grads / shards, coded, ranks, self._per_host)
        return swap(size.grads / shards, ranks, self._per_host)

    def _orthogonalized(self) -> Traffic:
        over, ranks = self._over, self._cluster.ranks
        return orthogonalize_traffic(self._matrices, ranks, over.steps, self._per_host)

    # --- memory -----------------------------------------------------------------------------------

    def memory(self, traced: Traced) -> dict[str, int]:
        """Return the bytes of each part at the peak of a step.

        Gradients grow while activations shrink: the peak is in a forward or a backward.
        """
        parts = self._run.predict()
        del parts["total"]
        peak, grads = self._peak(traced, parts["grads"])
        parts["offloaded"] += self._offloaded_state
        parts.update(grads=grads, optimizer=self._state, activations=peak)
        held = sum(size for part, size in parts.items() if part != "offloaded")
        return {**parts, "total": held}

    def _peak(self, traced: Traced, all_grads: int) -> tuple[int, int]:
        """Return the bytes of activations and of gradients where their sum is largest."""
        kept = self._kept_grads(all_grads)
        found = [(segment.peak, kept) for segment in traced.forward]
        arrived = 0.0
        each = all_grads / max(1, sum(size.numel for size in self._sizes))
        for mark in range(len(traced.marks), -1, -1):
            segment: Segment = traced.backward[mark]
            grads = min(int(arrived), all_grads)  # a module may run more than once
            found.append((segment.peak, max(grads, kept)))
            if mark > 0 and traced.marks[mark - 1][1]:
                arrived += each * self._sizes[traced.marks[mark - 1][0]].numel
        found.append((0, all_grads))
        part = COMPILED if self._way.compiled else 1.0
        return max(((int(part * live), grads) for live, grads in found), key=sum)

    def _kept_grads(self, all_grads: int) -> int:
        """Return the bytes of gradients that earlier micro-batches left."""
        return all_grads if self._way.accumulate > 1 else 0


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
