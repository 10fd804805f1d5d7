"""What deterministic="any-world" costs beside the default, and that its bits do not depend on
ranks.

    python -m benchmarks.any_world [--rounds 10]
    python -m benchmarks.any_world --cells

Costs: a GPT of 10 million parameters trains with the same micro-batches in a step by both, in turn.
The default accumulates within no_sync(). With --cells: the digest of weights and gradient norms
after five steps, for each number of ranks, strategy and transport.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import zshard
from benchmarks import harness
from benchmarks.harness import Sample, Spread
from benchmarks.models import WORKLOADS, Workload

SIDES = ("default", "any-world")
WORKLOAD = "gpt10m"
CASES = [
    ("full_shard", "shm", 2),
    ("full_shard", "shm", 8),
    ("full_shard", "shm", 6),
    ("no_shard", "shm", 8),
    ("full_shard", "c10d", 8),
    ("full_shard", "c10d", 6),
]
"""Strategy, transport, and micro-batches of both ranks in a step."""
STRATEGIES = ("full_shard", "shard_grad_op", "zero1", "no_shard", "hybrid_shard")
CELL_LEAVES, CELL_STEPS = 12, 5
MIB = 2**20

Step = Callable[[int], None]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    rounds = "turns of either kind (default: 10; with --quick: 1)"
    parser = harness.parser("Measure what deterministic='any-world' costs.", ranks=2, rounds=rounds)
    parser.add_argument("--cells", action="store_true", help="digests for each number of ranks")
    parser.add_argument("--case", type=int, help="only this one, by its number from 0")
    parser.add_argument("--digest", nargs=2, metavar=("STRATEGY", "TRANSPORT"), help="(inside)")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (1 if args.quick else 10)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        work = (lambda: digest(*args.digest)) if args.digest else lambda: measure(args)
        harness.measure_as_rank(args, work, show_digest if args.digest else show)
        return
    if args.cells:
        harness.finish(args, "any-world-cells", [cells(args.quick)])
        return
    wanted = range(len(CASES)) if args.case is None else [args.case]
    flags = harness.flags_of(args, "rounds")
    results = [
        harness.collect("benchmarks.any_world", args.ranks, [f"--case={i}", *flags]) for i in wanted
    ]
    harness.finish(args, "any-world", results)


# --- costs ----------------------------------------------------------------------------------------


def model_of(workload: Workload, **options: Any) -> Any:
    torch.manual_seed(0)
    return zshard.FSDP(workload.build(), auto_wrap_policy=set(workload.units), **options)


def default_step(workload: Workload, model: Any, count: int) -> Step:
    """Accumulate within no_sync(), reduce with the last."""
    optimizer = zshard.AdamW(model.parameters(), lr=workload.lr)
    batch = workload.batch(harness.generator())

    def step(_number: int) -> None:
        for i in range(count):
            with contextlib.nullcontext() if i == count - 1 else model.no_sync():
                (workload.loss(model, batch) / count).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def any_world_step(workload: Workload, model: Any) -> Step:
    optimizer = zshard.AdamW(model.parameters(), lr=workload.lr)
    batch = workload.batch(harness.generator())

    def step(number: int) -> None:
        for _ in model.micro_batches(number):
            workload.loss(model, batch).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Time the turns of one case and return the JSON record. Collective."""
    strategy, transport, leaves = CASES[args.case]
    workload = WORKLOADS[WORKLOAD]
    given = {"strategy": strategy, "transport": transport}
    models = {
        "default": model_of(workload, **given),
        "any-world": model_of(workload, deterministic="any-world", micro_batches=leaves, **given),
    }
    steps = {
        "default": default_step(workload, models["default"], -(-leaves // args.ranks)),
        "any-world": any_world_step(workload, models["any-world"]),
    }

    def turn_of(step: Step) -> harness.Turn:
        def turn(number: int) -> tuple[float]:
            begin = time.perf_counter()
            step(number)
            return (time.perf_counter() - begin,)

        return turn

    turns = {name: turn_of(step) for name, step in steps.items()}
    samples = harness.interleave(turns, args.rounds, warmup=1)
    ratios = harness.same_round_ratios(samples["any-world"], samples["default"])
    return {
        "strategy": strategy,
        "transport": transport,
        "micro_batches": leaves,
        "contended": sum(map(harness.contended, samples["default"] + samples["any-world"])),
        "ms": {name: spread_of(samples[name]) for name in SIDES},
        "ratio": Spread.of(ratios).as_dict(),
        "peak_mib": {name: models[name].memory("peak")["total"] / MIB for name in SIDES},
    }


def spread_of(samples: Sequence[Sample]) -> dict[str, Any]:
    clean = harness.clean_rounds(samples)
    return Spread.of([1e3 * samples[i].times[0] for i in clean]).as_dict()


def show(result: Mapping[str, Any]) -> None:
    """Print one case."""
    title = f"{result['strategy']}, {result['transport']}, M = {result['micro_batches']}"
    rows = [
        [name, Spread(**result["ms"][name]).text(0), f"{result['peak_mib'][name]:.1f}"]
        for name in SIDES
    ]
    header = ["side", "step, ms min/med/max", "zshard's peak, MiB"]
    harness.print_table(f"{title}: ratio {Spread(**result['ratio']).text(3)}", header, rows)


# --- cells ----------------------------------------------------------------------------------------


def digest(strategy: str, transport: str) -> str:
    """Train a small GPT for some steps; return a digest of weights and norms. Collective."""
    workload = WORKLOADS["tiny32"]
    options = {} if transport == "self" else {"transport": transport}
    model = model_of(
        workload, strategy=strategy, deterministic="any-world", micro_batches=CELL_LEAVES, **options
    )
    optimizer = zshard.AdamW(model.parameters(), lr=1e-3)
    norms = []
    for step in range(CELL_STEPS):
        for index in model.micro_batches(step):
            batch = workload.batch(torch.Generator().manual_seed(1000 * step + index))
            workload.loss(model, batch).backward()
        norms.append(float(model.clip_grad_norm_(0.1)))
        optimizer.step()
        optimizer.zero_grad()
    found = hashlib.sha256(repr(norms).encode())
    for _, value in sorted(model.state_dict().items()):
        found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def show_digest(text: str) -> None:
    print(text)


def cells(quick: bool) -> dict[str, str]:
    """Return the digests of all cells, and print them."""
    worlds = (1, 2) if quick else (1, 2, 3, 4)
    found = {}
    for world in worlds:
        for strategy in STRATEGIES:
            for transport in ("self",) if world == 1 else ("shm", "c10d"):
                flags = ["--digest", strategy, transport]
                key = f"{world} {strategy} {transport}"
                found[key] = harness.collect("benchmarks.any_world", world, flags)
    harness.print_table(
        f"{len(found)} cells, {len(set(found.values()))} checksum",
        ["ranks, strategy, transport", "checksum"],
        [[key, value] for key, value in found.items()],
    )
    return found


if __name__ == "__main__":
    harness.start(main)
