"""Durations and bytes of FSDP on GPUs, by data sheets: of gathers, reductions and the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from zshard import _core
from zshard.memory.report import size_of_state
from zshard.planner.durations import Compute, all_reduce, exchange, gather
from zshard.planner.traffic import CODE_BYTES, Traffic, ring, swap, swap_by_host
from zshard.planner.update import (
    Held,
    matrices_of,
    orthogonalize_seconds,
    orthogonalize_traffic,
    update_seconds,
)
from zshard.strategy import ShardingStrategy, strategy_of
from zshard.wrap.tree import UnitSpec

if TYPE_CHECKING:
    from zshard.memory.dry_run import DryRun
    from zshard.planner.prediction import Cluster, Way

Acts = Mapping[tuple[str, int], int]
"""How often a micro-batch does what with which unit: counts of Engine.predict_events()."""


class Over(NamedTuple):
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

    @classmethod
    def of(cls, strategy: ShardingStrategy, group: int, ranks: int) -> Over:
        if strategy is ShardingStrategy.NO_SHARD:
            return cls(1, ranks, 1, reduce_passes=2)
        if strategy is ShardingStrategy.ZERO1:
            return cls(1, ranks, ranks, refreshes=True)
        if strategy is ShardingStrategy.HYBRID_FULL:
            return cls(group, ranks, ranks, refreshes=True)
        if strategy.is_hybrid:
            return cls(group, group, group)
        return cls(ranks, ranks, ranks)


class Size(NamedTuple):
    """A unit. numel: elements of trained parameters. full: bytes of all parameters as they are
    gathered; grads: of the trained ones' gradients as they are reduced; own: of all parameters in
    their own dtype."""

    numel: int
    full: float
    grads: int
    own: int


class Modelled:
    """A model's units on a cluster. run: the dry run of wrapping it with these arguments."""

    def __init__(self, run: DryRun, model: torch.nn.Module, way: Way, cluster: Cluster) -> None:
        self._way, self._cluster = way, cluster
        self._per_host = cluster.network.per_host
        self._over = Over.of(strategy_of(way.strategy), cluster.group_of(way), cluster.ranks)
        self._units = [unit for unit, _ in run.in_order]
        self.sizes = [self._size_of(unit, spec) for unit, spec in run.in_order]
        self._parts = [self._part_of(unit, spec) for unit, spec in run.in_order]
        size_of = size_of_state(way.optimizer, model)
        self.state, self.offloaded = (run.trained_bytes(where, size_of) for where in (False, True))
        self._matrices = matrices_of(model) if way.optimizer == "muon" else []

    def _size_of(self, unit: _core.Unit, spec: UnitSpec) -> Size:
        params = [ref.param for ref in spec.params]
        trained = [param for param in params if param.requires_grad]
        full: float = sum(param.numel() * self._itemsize(param) for param in params)
        if unit.is_coded:
            full = sum(param.numel() for param in params) * CODE_BYTES[self._way.wire.parameters]
        grads = sum(param.numel() * self._itemsize(param) for param in trained)
        own = sum(param.numel() * param.itemsize for param in params)
        return Size(sum(param.numel() for param in trained), full, grads, own)

    def _part_of(self, unit: _core.Unit, spec: UnitSpec) -> Held:
        trained = cast = copy = 0
        for i, ref in enumerate(spec.params):
            numel, itemsize = unit.param(i)["numel"], ref.param.itemsize
            trained += numel * itemsize if ref.param.requires_grad else 0
            if self._itemsize(ref.param) != itemsize:
                cast, copy = cast + numel * itemsize, copy + numel * self._itemsize(ref.param)
        return Held(trained, cast, copy, unit.offloads[:2])

    def _itemsize(self, param: torch.Tensor) -> int:
        """Return the bytes of an element as it is computed with."""
        is_low = self._way.precision != "fp32" and param.is_floating_point()
        return 2 if is_low else param.itemsize

    def gather(self, i: int) -> float:
        over, full = self._over, self.sizes[i].full
        network = gather(self._cluster.network, full, over.gather)
        from_host = self._units[i].offloads[0] and over.gather > 1 and not over.refreshes
        return max(network, self._host_seconds(full / over.gather) if from_host else 0.0)

    def reduce(self, i: int) -> float:
        cluster, over, size = self._cluster, self._over, self.sizes[i].grads
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

    def copy_seconds(self, acts: Acts) -> float:
        """Return how long the kernels of a micro-batch wait for offloaded parameters that no rank
        shards: each use reads them from the host in the stream of kernels."""
        if self._over.gather > 1 or self._over.refreshes:
            return 0.0
        used = (i for (act, i), n in acts.items() if act == "gather" for _ in range(n))
        return self._host_seconds(
            sum(self.sizes[i].own for i in used if self._units[i].offloads[0])
        )

    def optimizer_seconds(self) -> float:
        """Return how long the optimizer's step takes, and the gather after it where copies of the
        parameters stay."""
        network, over, way = self._cluster.network, self._over, self._way
        ranks, device = self._cluster.ranks, self._cluster.device
        seconds = 0.0
        if way.optimizer is not None:
            held = self.state + self.offloaded, self.offloaded
            seconds = update_seconds(self._parts, *held, device)
        if self._matrices:
            compute = Compute(device, compiled=way.compiled)
            seconds += orthogonalize_seconds(self._matrices, ranks, compute)
            seconds += exchange(network, self._orthogonalized(), ranks)
        if not over.refreshes:
            return seconds
        return seconds + sum(gather(network, each.grads, ranks) for each in self.sizes)

    # --- traffic ----------------------------------------------------------------------------------

    def traffic(self, acts: Acts, times: int) -> Traffic:
        """Return the bytes that a rank receives in a step of so many micro-batches."""
        total = self._orthogonalized() if self._matrices else Traffic()
        ranks, over = self._cluster.ranks, self._over
        for (act, i), n in acts.items():
            if act == "gather":
                gathered = ring(self.sizes[i].full, over.gather, self._per_host)
                total = total.plus(gathered, n * times)
            elif act == "post":
                total = total.plus(self._reduced(i), n * times)
        if over.refreshes:  # from the ranks at this one's place in the other groups
            size = sum(each.grads for each in self.sizes) / over.gather
            per_host = max(1, self._per_host // over.gather)
            total = total.plus(ring(size, ranks // over.gather, per_host))
        return total

    def _reduced(self, i: int) -> Traffic:
        size, over, ranks = self.sizes[i].grads, self._over, self._cluster.ranks
        if not self._cluster.reduces_by_ring:
            again = ring(size, ranks, self._per_host) if over.reduce_passes == 2 else Traffic()
            return self._swapped(i).plus(again)
        replicas = ranks // over.reduce
        across = Traffic(0.0, 2 * size / over.reduce * (1 - 1 / replicas))
        return across.plus(ring(size, over.reduce, self._per_host), over.reduce_passes)

    def _swapped(self, i: int) -> Traffic:
        """Return what a rank receives to sum its shard."""
        size, ranks, code = self.sizes[i], self._cluster.ranks, self._way.wire.gradients
        shards = self._over.reduce
        by_host = code is not None or self._cluster.transport == "hosts"
        if by_host and ranks > self._per_host:
            coded = size.numel / shards * CODE_BYTES[code]
            return swap_by_host(size.grads / shards, coded, ranks, self._per_host)
        return swap(size.grads / shards, ranks, self._per_host)

    def _orthogonalized(self) -> Traffic:
        over, ranks = self._over, self._cluster.ranks
        return orthogonalize_traffic(self._matrices, ranks, over.steps, self._per_host)
