"""Muon: the optimizer's phase of a step, zshard.Muon against DDP with torch.optim.Muon.

    python -m benchmarks.muon [--layers 4] [--width 192] [--rounds 5] [--ns-dtype bfloat16]
    python -m benchmarks.muon --hosts 2x2 --gbit 10       # needs root, see hosts.py
    python -m benchmarks.muon --symmetric 768x3072 1024x1024 [--rounds 5]

Both sides train the same GPT on the same batches. step() is timed from a barrier to the end on the
slowest rank, and beside it the training step from zero_grad() on. Under DDP each rank computes the
update of each matrix. Both sides' AdamW (for embeddings, head, norms and biases) is a fused one.
The run also compares losses, and counts the bytes of momentum on a rank.

With --symmetric there are no ranks: CPU time of one update of matrices of these shapes, with one
thread, with symmetric=True against False.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zshard
from benchmarks import harness
from benchmarks.harness import Sample, Spread
from benchmarks.hosts import layout
from benchmarks.hosts_net import Hosts, run_ranks
from benchmarks.models import GPTBlock, Workload, gpt
from benchmarks.sides import SEED
from zshard.extras.optimizers.newton_schulz import orthogonalized

BASE, OURS = "ddp", "zshard"
TARGET = 0.55
"""Largest allowed median of OURS / BASE on one host with 2 ranks."""

MODULE = "benchmarks.muon"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Time the step of Muon."
    parser = harness.parser(purpose, 2, rounds="timed steps per side (default: 5; --quick: 2)")
    parser.add_argument("--layers", type=int, help="blocks of the GPT (default: 4; --quick: 2)")
    parser.add_argument("--width", type=int, help="its width (default: 192; --quick: 64)")
    parser.add_argument("--warmup", type=int, default=1, help="untimed steps (default: 1)")
    parser.add_argument("--ns-dtype", default="bfloat16", help="of zshard.Muon (bfloat16)")
    parser.add_argument("--hosts", type=layout, metavar="HxR", help="hosts x ranks of each")
    parser.add_argument("--gbit", type=float, default=10.0, help="of the hosts' links (10)")
    shapes = "measure products of these shapes"
    parser.add_argument("--symmetric", type=layout, nargs="+", metavar="RxC", help=shapes)
    args = parser.parse_args(argv)
    args.layers = args.layers or (2 if args.quick else 4)
    args.width = args.width or (64 if args.quick else 192)
    args.rounds = args.rounds or (2 if args.quick else 5)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if args.symmetric:
        for shape in args.symmetric:
            for dtype in (torch.float32, torch.bfloat16):
                compare_products(shape, dtype, args.rounds)
        return
    if harness.under_torchrun():
        harness.measure_as_rank(args, lambda: measure(args), show)
        return
    flags = harness.flags_of(args, "layers", "width", "rounds", "warmup", "ns_dtype")
    if args.hosts is None:
        result = harness.collect(MODULE, args.ranks, flags)
    else:
        count, ranks = args.hosts
        with Hosts(count, args.gbit) as hosts, tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            run_ranks(hosts, ranks, [sys.executable, "-m", MODULE, *flags, f"--out={out}"], {})
            result = json.loads(out.read_text())
        args.hosts = f"{count}x{ranks}"
    harness.finish(args, "muon", [result])


def compare_products(shape: tuple[int, int], dtype: torch.dtype, rounds: int) -> None:
    """Print the CPU time of an update with both values of `symmetric`, and how much they differ."""
    torch.set_num_threads(1)
    update = torch.randn(shape, generator=torch.Generator().manual_seed(SEED)).to(dtype)
    options = {"ns_coefficients": (3.4445, -4.7750, 2.0315), "eps": 1e-7, "ns_steps": 5}
    times: dict[bool, list[float]] = {False: [], True: []}
    found: dict[bool, torch.Tensor] = {}
    for _ in range(rounds):
        for symmetric in times:
            begin = time.process_time()
            result = orthogonalized(update.clone(), {**options, "symmetric": symmetric})
            times[symmetric].append(time.process_time() - begin)
            found[symmetric] = result.double()
    base, ours = (Spread.of([1e3 * each for each in times[kind]]) for kind in times)
    ratio = Spread.of([a / b for a, b in zip(times[True], times[False], strict=True)])
    error = (found[True] - found[False]).norm() / found[False].norm()
    print(
        f"{shape[0]} x {shape[1]} {str(dtype)[6:]}: {base.text(0)} ms -> {ours.text(0)} ms, "
        f"x {ratio.text(2)}, difference {error:.1e} of the norm",
        flush=True,
    )


class TwoOptimizers:
    """torch.optim.Muon for the matrices that zshard.Muon chooses, and AdamW for the rest."""

    def __init__(self, model: nn.Module) -> None:
        groups = zshard.Muon(model).param_groups
        chosen = [
            [param for group in groups if group["use_muon"] is own for param in group["params"]]
            for own in (True, False)
        ]
        self.matrices = torch.optim.Muon(chosen[0], lr=0.02)
        self.rest = torch.optim.AdamW(chosen[1], lr=1e-3, fused=True)

    def step(self) -> None:
        self.matrices.step()
        self.rest.step()


def build(name: str, workload: Workload, ns_dtype: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(SEED)
    model = workload.build()
    if name == BASE:
        return nn.parallel.DistributedDataParallel(model), TwoOptimizers(model)
    sharded = zshard.FSDP(model, auto_wrap_policy={GPTBlock})
    return sharded, zshard.Muon(sharded, lr=0.02, ns_dtype=ns_dtype, adamw={"lr": 1e-3})


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train with both sides in turn and return the JSON record. Collective."""
    workload = gpt("gpt", args.layers, args.width, seq=64, rows=2)
    sides = {name: build(name, workload, args.ns_dtype) for name in (BASE, OURS)}
    generator = harness.generator()
    batches = [workload.batch(generator) for _ in range(args.rounds + args.warmup)]
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in sides}

    def turn_of(name: str) -> harness.Turn:
        model, optimizer = sides[name]

        def turn(number: int) -> tuple[float, float]:
            start = time.perf_counter()
            model.zero_grad(set_to_none=True)
            loss = workload.loss(model, batches[number])
            loss.backward()  # type: ignore[no-untyped-call]
            losses[name].append(loss.detach())
            dist.barrier()
            begin = time.perf_counter()
            optimizer.step()
            end = time.perf_counter()
            return end - begin, end - start

        return turn

    samples = harness.interleave({name: turn_of(name) for name in sides}, args.rounds, args.warmup)
    worst = (torch.stack(losses[OURS]) - torch.stack(losses[BASE])).abs().max().double()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    momentum = {
        BASE: bytes_of(sides[BASE][1].matrices.state),
        OURS: bytes_of(sides[OURS][1].state),
    }
    return {
        "layers": args.layers,
        "width": args.width,
        "parameters": workload.parameters(),
        "ranks": dist.get_world_size(),
        "ns_dtype": args.ns_dtype,
        "loss_difference": float(worst),
        "sides": {name: summarize(name, samples, momentum[name]) for name in sides},
    }


def bytes_of(state: Mapping[Any, Mapping[str, Any]]) -> list[int]:
    """Return the bytes of momentum on each rank. Collective."""
    held = [each.get("momentum_buffer") for each in state.values()]
    return harness.of_all_ranks(sum(m.numel() * m.element_size() for m in held if m is not None))


def summarize(name: str, samples: Mapping[str, list[Sample]], momentum: list[int]) -> Any:
    mine = samples[name]
    times = [mine[i].times[0] * 1e3 for i in harness.clean_rounds(mine)]
    return {
        "ms": Spread.of(times).as_dict(),
        "ratio": Spread.of(harness.same_round_ratios(mine, samples[BASE])).as_dict(),
        "training_step_ms": Spread.of([mine[i].times[1] * 1e3 for i in range(len(mine))]).as_dict(),
        "contended": sum(map(harness.contended, mine)),
        "samples_ms": [round(sample.times[0] * 1e3, 3) for sample in mine],
        "momentum_bytes": momentum,
    }


def show(result: Mapping[str, Any]) -> None:
    rows = []
    for name, side in result["sides"].items():
        ratio, held = side["ratio"], side["momentum_bytes"]
        target = TARGET if name == OURS and result["ranks"] == 2 else None
        rows.append(
            [
                name,
                Spread(**side["ms"]).text(0),
                Spread(**ratio).text(2),
                harness.verdict(ratio["median"], target),
                Spread(**side["training_step_ms"]).text(0),
                f"{max(held) / 1e6:.2f}",
                str(side["contended"]),
            ]
        )
    title = (
        f"GPT of {result['parameters'] / 1e6:.1f} M parameters, {result['ranks']} ranks, "
        f"{result['ns_dtype']}, loss difference {result['loss_difference']:.1e}"
    )
    header = [
        *("side", "ms min/med/max", f"x {BASE}", "target", "training step, ms", "MB momentum"),
        "contended",
    ]
    harness.print_table(title, header, rows)


if __name__ == "__main__":
    harness.start(main)
