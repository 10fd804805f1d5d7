"""zshard.plan(): what each way to train a model on a cluster takes, what fits, which is fastest."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from zshard.api import (
    Offload,
    Wire,
    removal,
)
from zshard.extras.planner.gpus import GIB, Network, cluster_network, device_of
from zshard.extras.planner.prediction import Prediction, predict
from zshard.extras.planner.ways import PRECISIONS, Cluster, Way
from zshard.extras.planner.workloads import TrainStep, Workload, workload_of

GAP = 1.08
"""What torch's allocator reserves, beside what is allocated at the peak."""

CLOSE = 1.01
"""Of two ways whose times differ by less, the one that takes less memory is recommended."""

COMMENTS = {
    "full": "  # and checkpoint each block",
    "alternate": "  # and checkpoint every second block",
    "selective": "  # and checkpoint blocks, but keep attention and half of the matmuls",
}

STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "no_shard")
BETWEEN_HOSTS = ("hybrid_shard", "hybrid_full")
MOST_SAMPLES = 256

OFFLOADS = (Offload(), Offload(grads=True))
"""What is tried where nothing fits without."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What plan() found.

    Attributes:
        predictions: for each strategy and kind of checkpointing the fastest that fits, or the
            smallest if none does; the fastest first. If none fits, those that fit with offload=,
            too.
        best: the recommended one, or None if none fits.
        title: what was planned, in words.
        device: the name of the GPU. ranks: how many.
        unit: "tokens" or "samples": what `tokens` counts.
        limit: bytes of a GPU that training may take.

    str(plan) is a table.
    """

    predictions: Sequence[Prediction]
    best: Prediction | None
    title: str
    device: str
    ranks: int
    unit: str
    limit: float

    @property
    def _has_hosts(self) -> bool:
        return any(each.traffic.hosts for each in self.predictions)

    def fits(self, prediction: Prediction) -> bool:
        """Return whether a rank has memory for it."""
        return _fits(prediction, self.limit)

    def line(self) -> str:
        """Return the FSDP(...) line of the recommended way, with a comment where the model must
        checkpoint activations. Raises ValueError if none fits."""
        if self.best is None:
            raise ValueError("nothing fits, so there is no line: use more GPUs or a smaller model")
        way = self.best.way
        words = ["model"]
        if way.strategy != "full_shard":
            words.append(f'strategy="{way.strategy}"')
        if way.precision != "fp32":
            words.append("mixed_precision=MixedPrecision(torch.bfloat16)")
        if way.offload is not None:
            words.append(f"offload={way.offload.spelled()}")
        if way.wire != Wire():
            words.append("wire=" + way.wire.spelled().replace("'", '"'))
        comment = COMMENTS.get(way.checkpointing, "")
        return f"FSDP({', '.join(words)}){comment}"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Say what to use instead of a method that was removed."""
            unknown = f"'Plan' object has no attribute '{name}'"
            raise AttributeError(removal(f"Plan.{name}") or unknown)

    def to_json(self) -> str:
        """Return everything as JSON: times in seconds, memory in bytes. "received_bytes": of a rank
        in a step, from ranks of its "host" and from other "hosts"."""
        ways = [
            {
                **each.way._asdict(),
                "fits": self.fits(each),
                "seconds": each.seconds,
                f"{self.unit}_per_s_per_gpu": each.tokens_per_s,
                "tflops_per_gpu": each.tflops,
                "exposed": each.exposed,
                "received_bytes": each.traffic._asdict(),
                "memory": each.memory,
            }
            for each in self.predictions
        ]
        best = self.best and self.predictions.index(self.best)
        facts = {"gpu": self.device, "gpus": self.ranks, "best": best, "ways": ways}
        return json.dumps(facts, indent=1, default=dataclasses.asdict)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.title
        head = ("strategy", "checkpointing", "micro-batch", "GiB", "activations", "step s")
        more = (f"{self.unit}/s/GPU", "TFLOP/s", "exposed", "GB received")
        rows: list[tuple[str, ...]] = [(*head, *more, "")]
        rows += [self._row(each) for each in self.predictions]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for i, row in enumerate(rows):
            cells = [
                cell.ljust(width) if at < 2 else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(row[:-1], widths, strict=False))
            ]
            yield "  ".join([*cells, row[-1]]).rstrip()
            if i == 0:
                yield "-" * (sum(widths) + 2 * (len(widths) - 1))
        yield ""
        yield self._why()

    def _row(self, each: Prediction) -> tuple[str, ...]:
        way, memory = each.way, each.memory
        sizes = each.traffic if self._has_hosts else each.traffic[:1]
        return (
            name_of(way),
            way.checkpointing or "-",
            f"{way.micro_batch} x {way.accumulate}",
            f"{memory['total'] / GIB:.1f}",
            f"{memory['activations'] / GIB:.1f}",
            f"{each.seconds:.3f}",
            f"{each.tokens_per_s:,.0f}",
            f"{each.tflops:.3g}",
            f"{100 * each.exposed:.0f} %",
            " + ".join(f"{size / 1e9:.1f}" for size in sizes),
            "recommended" if each is self.best else "" if self.fits(each) else "does not fit",
        )

    def _why(self) -> str:
        if self.best is None:
            least = min(self.predictions, key=lambda each: each.memory["total"])
            more = "" if least.way.offload is not None else ", offload="
            return (
                f"Nothing fits into {self.limit / GIB:.0f} GiB: the least is "
                f"{GAP * least.memory['total'] / GIB:.0f} GiB, with {name_of(least.way)}. "
                f"More GPUs, a shorter sequence{more} or AdamW8bit reduce it."
            )
        room = f"{self.limit / GIB:.0f} GiB of {self.device}"
        host = self.best.memory["offloaded"]
        moved = f" It keeps {host / GIB:.0f} GiB of each rank in its host's memory." if host else ""
        return f"The fastest that fits into {room}:{moved}\n{self.line()}"


def name_of(way: Way) -> str:
    """Return the strategy as tables show it."""
    return way.strategy + (", offload" if way.offload is not None else "")


def _fits(prediction: Prediction, limit: float) -> bool:
    return GAP * prediction.memory["total"] <= limit


def plan(
    model: Any,
    gpus: int | None = None,
    gpu: str | None = None,
    *,
    step: TrainStep | None = None,
    seq: int | None = None,
    batch: int | None = None,
    strategies: Sequence[str] | None = None,
    precision: str = "bf16",
    optimizer: str | int | None = "adamw",
    compiled: bool = False,
    offload: Offload | str | os.PathLike[str] | bool | None = None,
    wire: str | Wire | None = None,
    per_host: int | None = None,
    nic: float | None = None,
    measure: None = None,
    transport: None = None,
) -> Plan:
    """Predict memory and speed of training, for each strategy, on GPUs that need not be there.

    Args:
        model: a module (on the meta device, or any other; not changed), a transformers config or
            the path of one, or zshard.Dims.
        gpus: how many.
        gpu: their name: python -m zshard plan --help lists them.
        step: for a module: a function of the model and a number of samples, which makes a batch of
            that size, runs the model on it and returns the loss.
        seq: tokens of a sample, for a config. Default: what it allows, at most 4096.
        batch: samples of a step on all GPUs. Default: what fits into one micro-batch on each.
        strategies: as for FSDP. Default: all that make sense here.
        precision: "bf16" (with state in float32), "fp32" or "fp8".
        optimizer: as for predict_memory().
        compiled: the model runs under torch.compile.
        offload: as for FSDP. None: tried if nothing fits without; False: never.
        wire: as for FSDP.
        per_host: GPUs of a host. Default: 8, or all.
        nic: Gbit/s of a host to the others. Default: what hosts with such GPUs usually have.
        measure, transport: removed; use `gpus` and `gpu`.

    Raises ValueError or TypeError for unknown names, NotImplementedError for an offload to disk,
    and what the model raises.
    """
    if measure is not None or transport is not None:
        raise TypeError(
            "plan(measure=, transport=) are removed; use gpus= and gpu=, predict_memory() for the "
            "memory of other ranks, and zshard.profile() for times"
        )
    if gpus is None or gpu is None:
        raise ValueError("plan() needs gpus= and gpu=: how many GPUs, and which")
    if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1:
        raise ValueError(f"gpus must be a positive integer, got {gpus!r}")
    if precision not in PRECISIONS:
        known = ", ".join(repr(each) for each in PRECISIONS)
        raise ValueError(f"unknown precision {precision!r}: expected one of {known}")
    offloaded = Offload.of(offload)
    usual = Way(
        precision=precision,
        optimizer=optimizer,
        compiled=compiled,
        offload=offloaded and offloaded.on("cuda"),
        wire=Wire.of(wire),
    )
    workload = workload_of(model, step, seq)._replace(traces={})
    name, device = device_of(gpu)
    cluster = Cluster(device, gpus, cluster_network(device, gpus, per_host, nic))
    return _plan(_Search(workload, cluster, batch), usual, strategies, offload is None, name)


def _plan(
    search: _Search, way: Way, strategies: Sequence[str] | None, may_offload: bool, name: str
) -> Plan:
    cluster, workload = search.cluster, search.workload
    tried = strategies or _strategies(cluster.ranks, cluster.network)
    found = search.all(way, tried)
    if may_offload and not any(map(search.fits, found)):
        found += search.offloaded(way, tried)
    found.sort(key=lambda each: (not search.fits(each), -each.tokens_per_s))
    fitting = [each for each in found if search.fits(each)]
    best = None
    if fitting:
        fast = [e for e in fitting if CLOSE * e.tokens_per_s >= fitting[0].tokens_per_s]
        best = min(fast, key=lambda each: each.memory["total"])
    title = _title(workload, way, cluster, name)
    return Plan(found, best, title, name, cluster.ranks, workload.unit, search.limit)


def _title(workload: Workload, way: Way, cluster: Cluster, gpu: str) -> str:
    numel = sum(param.numel() for param in workload.model.parameters())
    sample = f", {workload.tokens:,} tokens in a sample" if workload.unit == "tokens" else ""
    network = cluster.network
    hosts = ""
    if cluster.ranks > network.per_host:
        hosts = f", {network.per_host} in a host, {network.nic:g} Gbit/s between hosts"
    wire = f", wire {way.wire.spelled()}" if hosts and way.wire != Wire() else ""
    return (
        f"{numel / 1e6:,.1f} M parameters{sample}, {way.precision}, optimizer {way.optimizer}, on "
        f"{cluster.ranks} x {gpu}{hosts}{wire}"
    )


def _strategies(gpus: int, network: Network) -> Sequence[str]:
    if gpus == 1:
        return ("no_shard",)
    return STRATEGIES + (BETWEEN_HOSTS if gpus > network.per_host else ())


class _Search:
    """Looks for the largest micro-batch that is worth its memory."""

    def __init__(self, workload: Workload, cluster: Cluster, batch: int | None) -> None:
        self.workload, self.cluster = workload, cluster
        self._samples = None if batch is None else self._per_rank(batch)
        self.limit = (cluster.device.memory - cluster.device.reserved) * GIB

    def _per_rank(self, batch: int) -> int:
        if batch < 1 or batch % self.cluster.ranks:
            raise ValueError(
                f"batch={batch} is not a multiple of gpus={self.cluster.ranks}: each GPU gets as "
                "many samples as the others"
            )
        return batch // self.cluster.ranks

    def fits(self, prediction: Prediction) -> bool:
        return _fits(prediction, self.limit)

    def all(self, way: Way, strategies: Sequence[str]) -> list[Prediction]:
        """Return the best prediction of each strategy and kind of checkpointing."""
        kinds = itertools.product(strategies, self.workload.checkpointing)
        return [
            self.best(way._replace(strategy=strategy, checkpointing=kind))
            for strategy, kind in kinds
        ]

    def offloaded(self, way: Way, strategies: Sequence[str]) -> list[Prediction]:
        """Return those that fit by offloading the least; if none does, the smallest."""
        found: list[Prediction] = []
        for offload in OFFLOADS:
            found = self.all(way._replace(offload=offload), strategies)
            fitting = [each for each in found if self.fits(each)]
            if fitting:
                return fitting
        return [min(found, key=lambda each: each.memory["total"])]

    def best(self, way: Way) -> Prediction:
        """Return the fastest micro-batch of a way that fits, or else the smallest."""
        found: Prediction | None = None
        for micro_batch in self._micro_batches():
            accumulate = 1 if self._samples is None else self._samples // micro_batch
            each = predict(
                self.workload,
                way._replace(micro_batch=micro_batch, accumulate=accumulate),
                self.cluster,
            )
            fits = self.fits(each)
            if found is None or (fits and each.tokens_per_s > CLOSE * found.tokens_per_s):
                found = each
            if not fits:
                break
        assert found is not None  # there is a micro-batch of 1
        return found

    def _micro_batches(self) -> Iterator[int]:
        sizes = (1 << i for i in range(MOST_SAMPLES.bit_length()))
        for size in sizes:
            if self._samples is None or self._samples % size == 0:
                yield size
