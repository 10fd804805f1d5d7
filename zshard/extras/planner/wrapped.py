"""The units of a model on a cluster, as FSDP would make them: sizes, schedule and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from zshard import api
from zshard.api import ShardingStrategy, dry_run_of
from zshard.extras.planner.kernels import Traced
from zshard.extras.planner.traffic import CODE_BYTES
from zshard.extras.planner.update import Held
from zshard.extras.planner.ways import Cluster, Way, arguments_of
from zshard.extras.planner.workloads import Workload

COMPILED = 0.8
"""Part of the activations that is left with torch.compile, which computes some of them again."""


class Over(NamedTuple):
    """Group sizes of a strategy's collectives.

    gather, reduce: of a unit's parameters and gradients; sums then cross the replicas.
    reduce_passes: 1 to reduce-scatter, 2 to all-reduce. refreshes: copies are
    gathered anew after the optimizer's step.
    """

    gather: int
    reduce: int
    reduce_passes: int = 1
    refreshes: bool = False


def _over(strategy: ShardingStrategy, group: int, ranks: int) -> Over:
    if strategy is ShardingStrategy.NO_SHARD:
        return Over(1, ranks, reduce_passes=2)
    if strategy is ShardingStrategy.ZERO1:
        return Over(1, ranks, refreshes=True)
    if strategy is ShardingStrategy.HYBRID_FULL:
        return Over(group, ranks, refreshes=True)
    if strategy.is_hybrid:
        return Over(group, group)
    return Over(ranks, ranks)


class Size(NamedTuple):
    """A unit. numel: elements of all parameters; trained: of those that are trained. full: bytes of
    all parameters as they are gathered; grads: of the trained ones' gradients as they are reduced;
    stored: of all parameters in their own dtype."""

    numel: int
    trained: int
    full: float
    grads: int
    stored: int


class Wrapped:
    def __init__(self, workload: Workload, way: Way, cluster: Cluster) -> None:
        self.way, self.cluster = way, cluster
        model = workload.model
        group = way.group or min(cluster.network.per_host, cluster.ranks)
        self.over = _over(ShardingStrategy(way.strategy), group, cluster.ranks)
        self.run = dry_run_of(model, "auto", arguments_of(way), cluster.world(group))
        self.state, self.offloaded_state = self.run.state_bytes(way.optimizer)
        self.units = [unit for unit, _ in self.run.in_order]
        self.names = [unit.name or "root" for unit in self.units]
        self.modules = [spec.module for _, spec in self.run.in_order]
        params = [[ref.param for ref in spec.params] for _, spec in self.run.in_order]
        self.sizes = list(map(self._size_of, self.units, params))
        self.parts = list(map(self._part_of, self.units, params))

    def _size_of(self, unit: api.Unit, params: Sequence[nn.Parameter]) -> Size:
        trained = [param for param in params if param.requires_grad]
        numel, of_trained = (sum(param.numel() for param in some) for some in (params, trained))
        full: float = sum(param.numel() * self._itemsize(param) for param in params)
        if unit.is_coded:
            full = numel * CODE_BYTES
        grads = sum(param.numel() * self._itemsize(param) for param in trained)
        stored = sum(param.numel() * param.itemsize for param in params)
        return Size(numel, of_trained, full, grads, stored)

    def _part_of(self, unit: api.Unit, params: Sequence[nn.Parameter]) -> Held:
        trained = cast = copy = 0
        for i, param in enumerate(params):
            numel, itemsize = unit.param(i)["numel"], param.itemsize
            trained += numel * itemsize if param.requires_grad else 0
            if self._itemsize(param) != itemsize:
                cast, copy = cast + numel * itemsize, copy + numel * self._itemsize(param)
        return Held(trained, cast, copy, unit.offloads[:2])

    def _itemsize(self, param: torch.Tensor) -> int:
        """Return the bytes of an element as it is computed with."""
        is_low = self.way.precision != "fp32" and param.is_floating_point()
        return 2 if is_low else param.itemsize

    # --- schedule ---------------------------------------------------------------------------------

    def schedule(self, traced: Traced) -> tuple[list[tuple[str, int]], dict[int, int]]:
        """Return the engine's acts in the step that was traced, and the marks by the index of a
        call."""
        calls: list[tuple[api.Unit, int]] = []
        marks: dict[int, int] = {}
        entered: set[int] = set()
        for mark, (at, begins) in enumerate(traced.marks):
            unit = self.units[at]
            if begins and at not in entered:
                entered.add(at)  # before the unit, so its gradients come after all of its backward
                calls += [(unit, i) for i in range(unit.n_params)]
            marks[len(calls)] = mark
            calls.append((unit, -1 if begins else -2))
        self.run.engine.set_calls(calls)
        return self.run.engine.predict_events(), marks

    # --- memory -----------------------------------------------------------------------------------

    def memory(self, traced: Traced) -> dict[str, int]:
        """Return the bytes of each part at the peak of a step.

        Gradients grow while activations shrink: the peak is in a forward or a backward.
        """
        parts = self.run.engine.predict(False)
        del parts["total"]
        all_grads = parts["grads"]
        kept = all_grads if self.way.accumulate > 1 else 0  # of earlier micro-batches
        sums = [(segment.peak, kept) for segment in traced.forward]
        arrived = 0.0
        per_element = all_grads / max(1, sum(size.trained for size in self.sizes))
        for mark in range(len(traced.marks), -1, -1):
            grads = min(int(arrived), all_grads)  # a module may run more than once
            sums.append((traced.backward[mark].peak, max(grads, kept)))
            if mark > 0 and traced.marks[mark - 1][1]:
                arrived += per_element * self.sizes[traced.marks[mark - 1][0]].trained
        sums.append((0, all_grads))
        part = COMPILED if self.way.compiled else 1.0
        peak, grads = max(((int(part * live), grads) for live, grads in sums), key=sum)
        parts["offloaded"] += self.offloaded_state
        parts.update(grads=grads, optimizer=self.state, activations=peak)
        return {**parts, "total": sum(parts.values()) - parts["offloaded"]}
