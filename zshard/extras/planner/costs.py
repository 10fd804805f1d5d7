"""Costs of a model's units on a cluster: seconds, from data sheets, and bytes."""

from __future__ import annotations

from collections.abc import Mapping

from zshard.extras.planner.durations import Compute, all_reduce, exchange, gather
from zshard.extras.planner.kernels import Traced
from zshard.extras.planner.timeline import Durations
from zshard.extras.planner.traffic import CODE_BYTES, Traffic, ring, swap, swap_by_host
from zshard.extras.planner.update import update_seconds
from zshard.extras.planner.wrapped import Wrapped

Acts = Mapping[tuple[str, int], int]
"""(act, unit) -> how often a micro-batch does it."""


class Costs:
    def __init__(self, wrapped: Wrapped, acts: Acts) -> None:
        self._wrapped, self._acts = wrapped, acts
        self._way, self._over, self._sizes = wrapped.way, wrapped.over, wrapped.sizes
        self._cluster, self._ranks = wrapped.cluster, wrapped.cluster.ranks
        self._network, self._per_host = self._cluster.network, self._cluster.network.per_host

    def durations(self, traced: Traced) -> Durations:
        """Return the seconds of the parts of a micro-batch."""
        way, places = self._way, range(len(self._sizes))
        compute = Compute(self._cluster.device, way.precision, way.compiled, way.attention)
        return Durations(
            compute.of_segments(traced.forward),
            compute.of_segments(traced.backward),
            [self._gather(i) for i in places],
            [self._reduce(i) for i in places],
        )

    def _gather(self, i: int) -> float:
        over, full = self._over, self._sizes[i].full
        network = gather(self._network, full, over.gather)
        from_host = self._wrapped.units[i].offloads[0] and over.gather > 1 and not over.refreshes
        return max(network, self._host_seconds(full / over.gather) if from_host else 0.0)

    def _reduce(self, i: int) -> float:
        over, size = self._over, self._sizes[i].grads
        network, ranks = self._network, self._ranks
        if self._cluster.reduces_by_ring:
            return over.reduce_passes * gather(network, size, over.reduce) + all_reduce(
                network, size / over.reduce, ranks // over.reduce
            )
        seconds = exchange(network, self._swapped(i), ranks)
        if over.reduce_passes == 2:
            seconds += gather(network, size, ranks)
        to_host = self._wrapped.parts[i].trained if self._wrapped.units[i].offloads[1] else 0
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
            sum(self._sizes[i].stored for i in used if self._wrapped.units[i].offloads[0])
        )

    def step_seconds(self) -> float:
        """Return how long the optimizer's step takes, and the gather after it where copies of the
        parameters stay."""
        wrapped, device = self._wrapped, self._cluster.device
        seconds = 0.0
        if self._way.optimizer is not None:
            held = wrapped.state + wrapped.offloaded_state, wrapped.offloaded_state
            seconds = update_seconds(wrapped.parts, *held, device)
        if not self._over.refreshes:
            return seconds
        return seconds + sum(gather(self._network, each.grads, self._ranks) for each in self._sizes)

    # --- traffic ----------------------------------------------------------------------------------

    def traffic(self, times: int) -> Traffic:
        """Return the bytes that a rank receives in a step of so many micro-batches, whose timeline
        was made."""
        total, ranks, over = Traffic(), self._ranks, self._over
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
        size, over, ranks = self._sizes[i].grads, self._over, self._ranks
        if not self._cluster.reduces_by_ring:
            again = ring(size, ranks, self._per_host) if over.reduce_passes == 2 else Traffic()
            return self._swapped(i).plus(again)
        replicas = ranks // over.reduce
        across = Traffic(0.0, 2 * size / over.reduce * (1 - 1 / replicas))
        return across.plus(ring(size, over.reduce, self._per_host), over.reduce_passes)

    def _swapped(self, i: int) -> Traffic:
        """Return what a rank receives to sum its shard."""
        size, ranks = self._sizes[i], self._ranks
        shards = self._over.reduce
        if self._way.wire.gradients is not None and ranks > self._per_host:
            coded = size.trained / shards * CODE_BYTES
            return swap_by_host(size.grads / shards, coded, ranks, self._per_host)
        return swap(size.grads / shards, ranks, self._per_host)
