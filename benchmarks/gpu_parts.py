"""The smaller parts of benchmarks/gpu.py: host time, AdamW, a loss curve, ranks on one GPU.

Each part is a function that takes its cell, a dict of plain values, and returns a record of plain
values. Its ranks run in their own process group.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zshard
from benchmarks import harness, host_time
from benchmarks.gpu_sides import (
    BASE,
    BY_HAND,
    OURS,
    batches_of,
    build,
    build_tiny,
    device,
    have_own_gpus,
    is_stand_in,
    synchronize,
)
from benchmarks.gpu_steps import repeated
from benchmarks.harness import Spread
from benchmarks.models import TINY_BLOCKS, Batch, Workload, gpt
from benchmarks.sides import SEED

# --------------------------------------------------------------------------------------
# Host time


def host(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the host time that each library adds to a unit's forward and backward.

    cell: "sides" (besides the plain module), "rounds", "warmup", "steps". Tensors are tiny, so the
    GPU always waits for the host.
    """
    names = [host_time.PLAIN, *cell["sides"]]
    sides = {name: build_tiny(name) for name in names}
    (batch,) = batches_of(sides[host_time.PLAIN].workload, 1)
    turns = {
        name: host_time.turn_of(side, batch, cell["steps"], synchronize)
        for name, side in sides.items()
    }
    samples = harness.interleave(turns, cell["rounds"], cell["warmup"])
    return {
        "part": "host",
        "units": TINY_BLOCKS,
        "plain_us": {
            part: Spread.of(
                [s.times[i] * 1e6 / TINY_BLOCKS for s in samples[host_time.PLAIN]]
            ).as_dict()
            for i, part in enumerate(host_time.PARTS)
        },
        "sides": {name: host_time.summarize(name, samples, 1) for name in cell["sides"]},
    }


# --------------------------------------------------------------------------------------
# AdamW

BYTES = 28  # an element: four arrays of float32 are read, three written
COPY = "copy"
COPY_BYTES = 8
FUSED = "torch-fused"
STOCHASTIC = "zshard bf16, stochastic"
EIGHT_BIT = "zshard 8-bit"
EIGHT_BIT_BYTES = 16 + 1 / 8  # parameter twice, gradient, two codes twice; two scales of 32 twice
MASTER = "zshard 8-bit, bf16 + int8"
MASTER_BYTES = 12 + 1 / 8
GOALS = {OURS: 0.95, EIGHT_BIT: 0.85}  # of the rate of a copy


def adam(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Measure GB/s of an AdamW step: zshard's (with moments in 32 and in 8 bits), torch's, and as a
    fraction of a device copy's rate.

    cell: "elements", "tensors" (number of equal tensors), "rounds", "warmup", "steps".
    """
    numel = cell["elements"] // cell["tensors"]
    where = {"device": device()}
    params = [nn.Parameter(torch.randn(numel, **where)) for _ in range(cell["tensors"])]
    halves = [nn.Parameter(param.detach().bfloat16()) for param in params]
    for param in (*params, *halves):
        param.grad = torch.randn_like(param)
    source, target = torch.randn(2, cell["elements"], **where)
    in_8_bits = functools.partial(zshard.AdamW8bit, min_8bit_size=0)
    calls: dict[str, tuple[Callable[[], Any], float]] = {
        OURS: (zshard.AdamW(params).step, BYTES),
        FUSED: (torch.optim.AdamW(params, fused=True).step, BYTES),
        STOCHASTIC: (zshard.AdamW(halves, stochastic_rounding=True).step, BYTES // 2),
        EIGHT_BIT: (in_8_bits(params).step, EIGHT_BIT_BYTES),
        MASTER: (in_8_bits(halves, master="int8").step, MASTER_BYTES),
        COPY: (lambda: target.copy_(source), COPY_BYTES),
    }
    turns = {name: repeated(call, cell["steps"]) for name, (call, _) in calls.items()}
    samples = harness.interleave(turns, cell["rounds"], cell["warmup"])
    elements = numel * cell["tensors"]
    rates = {
        name: [moved * elements / s.times[0] / 1e9 for s in samples[name]]
        for name, (_, moved) in calls.items()
    }
    shares = {
        name: Spread.of([mine / copy for mine, copy in zip(rate, rates[COPY], strict=True)])
        for name, rate in rates.items()
    }
    return {
        "part": "adam",
        "elements": elements,
        "tensors": cell["tensors"],
        "sides": {
            name: {
                "ms": Spread.of([s.times[0] * 1e3 for s in samples[name]]).as_dict(),
                "gb_per_s": Spread.of(rates[name]).as_dict(),
                "share_of_copy": shares[name].as_dict(),
                "goal": None if is_stand_in() else GOALS.get(name),
            }
            for name in calls
        },
    }


# --------------------------------------------------------------------------------------
# A loss curve

TEXTS = ("*.md", "docs/*.md", "zshard/*.py", "csrc/**/*.[ch]", "tests/**/*.py")
TOLERANCES = {BY_HAND: 0.01, BASE: 0.03}
"""Side -> largest allowed relative difference of zshard's loss (mean of ten steps) from it.
Autocast rounds at other places."""


def curve(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Train a byte-level GPT on this repository's text with zshard and plain PyTorch.

    cell: "layers", "width", "seq", "rows", "steps".
    """
    workload = gpt("curve", cell["layers"], cell["width"], cell["seq"], cell["rows"])
    batches = _texts(cell["steps"], cell["rows"], cell["seq"])
    losses = {name: _losses(name, workload, batches) for name in (BASE, BY_HAND, OURS)}
    tens = {name: values.view(-1, 10).mean(1) for name, values in losses.items()}
    apart = {
        name: float(((tens[OURS] - tens[name]).abs() / tens[name]).max()) for name in TOLERANCES
    }
    return {
        "part": "curve",
        **{key: cell[key] for key in ("layers", "width", "seq", "rows", "steps")},
        "losses": {name: [round(x, 5) for x in values.tolist()] for name, values in tens.items()},
        "largest_difference": apart,
        "tolerance": TOLERANCES,
    }


def _texts(steps: int, rows: int, seq: int) -> list[Batch]:
    files = [path for glob in TEXTS for path in sorted(harness.ROOT.glob(glob))]
    text = torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(SEED)
    batches = []
    for _ in range(steps):
        begins = torch.randint(len(text) - seq - 1, (rows,), generator=generator)
        cut = torch.stack([text[b : b + seq + 1] for b in begins.tolist()]).long().to(device())
        batches.append((cut[:, :-1].contiguous(), cut[:, 1:].contiguous()))
    return batches


def _losses(name: str, workload: Workload, batches: Sequence[Batch]) -> Tensor:
    side = build(name, workload)
    return torch.stack([side.step(batch) for batch in batches]).double().cpu()


# --------------------------------------------------------------------------------------
# Ranks that share a GPU


def ranks(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the losses of several ranks on one GPU, over each transport, with DDP's. Collective.

    cell: "layers", "width", "seq", "rows", "steps". Checks correctness only.
    """
    workload = gpt("ranks", cell["layers"], cell["width"], cell["seq"], cell["rows"])
    batches = batches_of(workload, cell["steps"])
    expected = _train(nn.parallel.DistributedDataParallel(_seeded(workload)), workload, batches)
    sides: dict[str, Any] = {}
    first: Tensor | None = None
    for transport in _transports():
        for strategy in ("full_shard", "no_shard"):
            model: Any = zshard.FSDP(
                _seeded(workload),
                strategy=strategy,
                auto_wrap_policy=set(workload.units),
                transport="c10d" if is_stand_in() else transport,
                timeout=120,
            )
            found = _train(model, workload, batches)
            first = found if first is None else first
            sides[f"{transport} {strategy}"] = {
                "largest_difference_to_ddp": _of_all(float(((found - expected).abs()).max())),
                "same_bits_as_first": _of_all(float(not torch.equal(found, first))) == 0,
            }
    return {"part": "ranks", "ranks": dist.get_world_size(), "steps": cell["steps"], "sides": sides}


def _transports() -> list[str]:
    """Return the transports that work here; NCCL needs a GPU for each rank."""
    if is_stand_in():
        return [os.environ.get("ZSHARD_BACKEND", "c10d")]
    return ["nccl", "c10d"] if have_own_gpus() else ["c10d"]


def _seeded(workload: Workload) -> nn.Module:
    torch.manual_seed(SEED)
    with torch.device(device()):
        return workload.build()


def _train(model: nn.Module, workload: Workload, batches: Sequence[Batch]) -> Tensor:
    optimizer = zshard.AdamW(model.parameters(), lr=workload.lr)
    losses = []
    for batch in batches:
        loss = workload.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).double().cpu()


def _of_all(number: float) -> float:
    """Return the maximum over all ranks."""
    largest = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


PARTS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "host": host,
    "adam": adam,
    "curve": curve,
    "ranks": ranks,
}
