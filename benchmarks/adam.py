"""Adam: a zshard.AdamW step, compared with torch's three and a plain C loop over the same memory.

    python -m benchmarks.adam [--threads 1 2] [--elements 50000000] [--tensors 1] [--rounds 15]

An AdamW step reads the parameter, the gradient and two moments and writes all but the gradient: 28
bytes per element in float32, so at this size memory bandwidth is the limit. All sides use the same
tensors and therefore the same pages. `stream` (stream.c, compiled at startup) moves the same 28
bytes with almost no arithmetic: the upper bound.

Two more rows use bfloat16 parameters with bfloat16 state, 14 bytes per element, rounded to nearest
and stochastically. They use separate tensors.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zshard
from benchmarks import harness
from benchmarks.harness import Sample, Spread

OURS = "zshard"
STREAM = "stream"
NEAREST = "zshard bf16"
STOCHASTIC = "zshard bf16, stochastic"
BYTES = 28
TARGETS = {"torch-fused": 1.03, STREAM: 1 / 0.9}
"""Side -> largest allowed median of OURS / side."""

Step = Callable[[], Any]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Time an AdamW step of zshard, of torch and of a plain C loop."
    parser = harness.parser(purpose, rounds="samples per side (default: 15; with --quick: 5)")
    parser.add_argument(
        "--warmup", type=int, default=2, help="untimed samples per side (default: 2)"
    )
    parser.add_argument(
        "--threads", nargs="+", type=int, default=[1, 2], help="thread counts (default: 1 2)"
    )
    parser.add_argument(
        "--elements", type=int, help="total elements (default: 50 M; with --quick: 2 M)"
    )
    parser.add_argument(
        "--tensors", type=int, default=1, help="number of equal tensors (default: 1)"
    )
    args = parser.parse_args(argv)
    args.elements = args.elements or (2_000_000 if args.quick else 50_000_000)
    args.rounds = args.rounds or (5 if args.quick else 15)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        measure_as_rank(args)
        return
    flags = harness.flags_of(args, "elements", "tensors", "rounds", "warmup")
    results = [
        harness.collect(
            "benchmarks.adam",
            1,
            [f"--threads={threads}", *flags],
            {"OMP_NUM_THREADS": str(threads)},
        )
        for threads in args.threads
    ]
    harness.finish(args, "adam", results)


def measure_as_rank(args: argparse.Namespace) -> None:
    """Measure in this rank; each thread count has its own process."""
    with harness.process_group(), tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder))
    show(result)
    if args.out:
        harness.write_json(args.out, result)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Time all sides and return the JSON record."""
    threads = args.threads[0]
    torch.set_num_threads(threads)
    params, states = tensors(args.elements, args.tensors)
    steps: dict[str, Step] = {
        name: optimizer.step for name, optimizer in optimizers(params, states).items()
    }
    steps[STREAM] = stream_over(params, states, threads, folder)
    halves = [param.detach().to(torch.bfloat16) for param in params]
    for name, stochastic in ((NEAREST, False), (STOCHASTIC, True)):
        steps[name] = step_of_bf16(halves, stochastic)
    turns = {name: turn_of(step) for name, step in steps.items()}
    samples = harness.interleave(turns, args.rounds, args.warmup)
    elements = sum(p.numel() for p in params)
    return {
        "threads": threads,
        "elements": elements,
        "tensors": args.tensors,
        "sides": {name: summarize(name, samples, elements) for name in samples},
    }


def tensors(elements: int, count: int) -> tuple[list[nn.Parameter], list[dict[str, Tensor]]]:
    """Return `count` equal float32 parameters with gradients, and the AdamW state of each."""
    numel = elements // count
    params = [nn.Parameter(torch.randn(numel)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(numel)
    moments = [{"exp_avg": torch.zeros(numel), "exp_avg_sq": torch.ones(numel)} for _ in params]
    return params, [{"step": torch.tensor(1.0), **two} for two in moments]


def optimizers(
    params: list[nn.Parameter], states: list[dict[str, Tensor]]
) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers, which share parameters and state tensors."""
    made: dict[str, torch.optim.Optimizer] = {
        OURS: zshard.AdamW(params),
        "torch-fused": torch.optim.AdamW(params, fused=True),
        "torch-foreach": torch.optim.AdamW(params, foreach=True),
        "torch-default": torch.optim.AdamW(params),
    }
    for optimizer in made.values():
        for param, state in zip(params, states, strict=True):
            optimizer.state[param] = dict(state)
    return made


def step_of_bf16(values: list[Tensor], stochastic: bool) -> Step:
    """Return an AdamW step for bfloat16 parameters that share the memory of `values`."""
    params = [nn.Parameter(value) for value in values]
    for param in params:
        param.grad = torch.ones_like(param)
    return zshard.AdamW(params, stochastic_rounding=stochastic).step


def stream_over(
    params: list[nn.Parameter], states: list[dict[str, Tensor]], threads: int, folder: Path
) -> Step:
    """Return a call that streams over the same memory. Raises SystemExit without a C compiler."""
    library = folder / "stream.so"
    flags = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
    source = harness.ROOT / "benchmarks" / "stream.c"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    try:
        subprocess.run([*compiler, *flags, str(source), "-o", str(library)], check=True)
    except OSError as error:
        raise SystemExit(f"cannot compile {source}: {error}; set CC to a C compiler") from error
    stream = ctypes.CDLL(str(library)).stream
    calls = [
        [
            ctypes.c_void_p(t.data_ptr())
            for t in (p, p.grad, s["exp_avg"], s["exp_avg_sq"])
            if t is not None
        ]
        for p, s in zip(params, states, strict=True)
    ]
    numel = ctypes.c_int64(params[0].numel())

    def step() -> None:
        for pointers in calls:
            if stream(*pointers, numel, ctypes.c_int(threads)) != 0:
                raise SystemExit("stream.c failed to start its threads")

    return step


def turn_of(step: Step) -> harness.Turn:
    """Return a turn of one step."""

    def turn(_number: int) -> tuple[float, ...]:
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin,)

    return turn


def summarize(name: str, samples: Mapping[str, list[Sample]], elements: int) -> dict[str, Any]:
    """Return one side's record: milliseconds, GB/s, and the ratio of OURS to it."""
    seconds = [samples[name][i].times[0] for i in harness.clean_rounds(samples[name])]
    ratios = harness.same_round_ratios(samples[OURS], samples[name])
    size = BYTES / 2 if name in (NEAREST, STOCHASTIC) else BYTES
    return {
        "ms": Spread.of([1e3 * s for s in seconds]).as_dict(),
        "gb_per_s": Spread.of([size * elements / s / 1e9 for s in seconds]).as_dict(),
        "zshard_ratio": None if name == OURS else Spread.of(ratios).as_dict(),
        "target": TARGETS.get(name),
    }


def show(result: Mapping[str, Any]) -> None:
    """Print the table for one thread count."""
    rows = []
    for name, side in result["sides"].items():
        ratio = side["zshard_ratio"]
        rows.append(
            [
                name,
                Spread(**side["ms"]).text(2),
                Spread(**side["gb_per_s"]).text(1),
                Spread(**ratio).text(3) if ratio else "",
                harness.verdict(ratio and ratio["median"], side["target"]),
            ]
        )
    title = f"AdamW, {result['elements']:,} elements, {result['threads']} threads (min/median/max)"
    harness.print_table(title, ["side", "ms", "GB/s", "zshard / side", "target"], rows)


if __name__ == "__main__":
    harness.start(main)
