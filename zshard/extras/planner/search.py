"""zshard.plan(): what each way to train a model on a cluster takes, what fits, which is fastest."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from zshard.api import Offload, Wire, removal
from zshard.extras.planner.gpus import GIB, cluster_network, device_of
from zshard.extras.planner.prediction import Prediction, predict
from zshard.extras.planner.ways import PRECISIONS, Cluster, Way
from zshard.extras.planner.workloads import TrainStep, Workload, workload_of

GAP = 1.08
"""Bytes that torch's allocator reserves on top of the allocated peak."""

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
"""Options that are tried if nothing fits without them."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of plan().

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

    def fits(self, prediction: Prediction) -> bool:
        """Return whether a rank has memory for it."""
        return _fits(prediction, self.limit)

    def line(self) -> str:
        """Return the FSDP(...) line of the recommended way, with a comment where the model must
        checkpoint activations. Raises ValueError if none fits."""
        if self.best is None:
            raise ValueError("nothing fits, so there is no plan: use more GPUs or a smaller model")
        way, words = self.best.way, ["model"]
        if way.strategy != "full_shard":
            words.append(f'strategy="{way.strategy}"')
        if way.precision != "fp32":
            words.append("mixed_precision=MixedPrecision(torch.bfloat16)")
        if way.offload is not None:
            words.append(f"offload={way.offload.spelled()}")
        if way.wire != Wire():
            words.append("wire=" + way.wire.spelled().replace("'", '"'))
        return f"FSDP({', '.join(words)}){COMMENTS.get(way.checkpointing, '')}"

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
        head = ("strategy", "checkpointing", "micro-batch", "GiB", "activations", "step s")
        more = (f"{self.unit}/s/GPU", "TFLOP/s", "exposed", "GB received")
        rows: list[tuple[str, ...]] = [(*head, *more, ""), *map(self._row, self.predictions)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for *words, note in rows:
            cells = [word.ljust(width) for word, width in zip(words[:2], widths, strict=False)]
            cells += [word.rjust(w) for word, w in zip(words[2:], widths[2:], strict=False)]
            lines.append("  ".join([*cells, note]).rstrip())
        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        limit = f"{self.limit / GIB:.0f} GiB"
        if self.best is None:
            least = min(self.predictions, key=lambda each: each.memory["total"])
            more_memory = f"{GAP * least.memory['total'] / GIB:.0f} GiB, with {name_of(least.way)}"
            why = f"Nothing fits into {limit}: the least is {more_memory}."
        else:
            host = self.best.memory["offloaded"] / GIB
            moved = f" It keeps {host:.0f} GiB of each rank in its host's memory." if host else ""
            why = f"The fastest that fits into {limit} of {self.device}:{moved}\n{self.line()}"
        return "\n".join([self.title, lines[0], rule, *lines[1:], "", why])

    def _row(self, each: Prediction) -> tuple[str, ...]:
        way, memory = each.way, each.memory
        has_hosts = any(each.traffic.hosts for each in self.predictions)
        sizes = each.traffic if has_hosts else each.traffic[:1]
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
) -> Plan:
    """Predict memory and speed of a training run, for each strategy, without the GPUs.

    Args:
        model: a module (on the meta device, or any other; not changed), a transformers config or
            the path of one, or zshard.Dims.
        gpus: how many.
        gpu: their name: python -m zshard plan --help lists them.
        step: for a module: a function of the model and a number of samples, which makes a batch of
            that size, runs the model on it and returns the loss.
        seq: sequence length, for a config. Default: what it allows, at most 4096.
        batch: global batch size, in samples. Default: what fits into one micro-batch on each GPU.
        strategies: as for FSDP. Default: all that make sense here.
        precision: "bf16" (with state in float32), "fp32" or "fp8".
        optimizer: as for predict_memory(), but not "muon".
        compiled: the model runs under torch.compile.
        offload: as for FSDP. None: tried if nothing fits without; False: never.
        wire: as for FSDP.
        per_host: GPUs per node. Default: 8, or all.
        nic: Gbit/s of a node to the others. Default: what hosts with such GPUs usually have.

    Raises ValueError or TypeError for unknown names, NotImplementedError for an offload to disk,
    and what the model raises.
    """
    if gpus is None or gpu is None:
        raise ValueError("plan() needs gpus= and gpu=: how many GPUs, and which")
    if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1:
        raise ValueError(f"gpus must be a positive integer, got {gpus!r}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
    if batch is not None and (batch < 1 or batch % gpus):
        raise ValueError(f"batch={batch} is not a multiple of gpus={gpus}: choose a multiple")
    if str(optimizer).lower() == "muon":
        words = 'pass optimizer="adamw" here, and "muon" to predict_memory() for its state'
        raise ValueError(f"plan() does not predict Muon's step: {words}")
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
    search = _Search(workload, cluster, batch)
    predictions, best = search.run(usual, strategies, offload is None)
    title = f"{sum(param.numel() for param in workload.model.parameters()) / 1e6:,.1f} M parameters"
    if workload.unit == "tokens":
        title += f", sequence length {workload.tokens:,}"
    title += f", {precision}, optimizer {optimizer}, on {gpus} x {name}"
    if gpus > cluster.network.per_host:
        title += f", {cluster.network.per_host} per node, {cluster.network.nic:g} Gbit/s between"
        title += f" nodes, wire {usual.wire.spelled()}" if usual.wire != Wire() else " nodes"
    return Plan(predictions, best, title, name, gpus, workload.unit, search.limit)


class _Search:
    def __init__(self, workload: Workload, cluster: Cluster, batch: int | None) -> None:
        self._workload, self._cluster = workload, cluster
        self._samples = None if batch is None else batch // cluster.ranks
        self.limit = (cluster.device.memory - cluster.device.reserved) * GIB

    def _fit(self, prediction: Prediction) -> bool:
        return _fits(prediction, self.limit)

    def run(
        self, way: Way, strategies: Sequence[str] | None, may_offload: bool
    ) -> tuple[list[Prediction], Prediction | None]:
        """Return all predictions, and the recommended one."""
        ranks, per_host = self._cluster.ranks, self._cluster.network.per_host
        usual = STRATEGIES + (BETWEEN_HOSTS if ranks > per_host else ())
        tried = strategies or (("no_shard",) if ranks == 1 else usual)
        predictions = self._all(way, tried)
        if may_offload and not any(map(self._fit, predictions)):
            offloaded: list[Prediction] = []
            for offload in OFFLOADS:  # the least that makes one fit; if none does, the smallest
                if not any(map(self._fit, offloaded)):
                    offloaded = self._all(way._replace(offload=offload), tried)
            least = min(offloaded, key=lambda each: each.memory["total"])
            predictions += list(filter(self._fit, offloaded)) or [least]
        predictions.sort(key=lambda each: (not self._fit(each), -each.tokens_per_s))
        fitting = [each for each in predictions if self._fit(each)]
        fast = [e for e in fitting if CLOSE * e.tokens_per_s >= fitting[0].tokens_per_s]
        return predictions, min(fast, key=lambda each: each.memory["total"], default=None)

    def _all(self, way: Way, strategies: Sequence[str]) -> list[Prediction]:
        return [
            self._best(way._replace(strategy=strategy, checkpointing=kind))
            for strategy in strategies
            for kind in self._workload.checkpointing
        ]

    def _best(self, way: Way) -> Prediction:
        """Return the fastest micro-batch of a way that fits, or else the smallest."""
        best: Prediction | None = None
        for size in (1 << i for i in range(MOST_SAMPLES.bit_length())):
            if self._samples is not None and self._samples % size:
                continue
            accumulate = 1 if self._samples is None else self._samples // size
            way = way._replace(micro_batch=size, accumulate=accumulate)
            each = predict(self._workload, way, self._cluster)
            fits = self._fit(each)
            if best is None or (fits and each.tokens_per_s > CLOSE * best.tokens_per_s):
                best = each
            if not fits:
                break
        assert best is not None  # there is a micro-batch of 1
        return best
