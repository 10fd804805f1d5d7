"""What clip_grad_norm_ and a GradScaler add to an optimizer's step, in time and in bytes of memory.

    python -m benchmarks.clipping [--width 2048] [--layers 5] [--rounds 15]

All sides train the same stack of linear layers with zshard.AdamW in float32. `step` does not clip.
`clip` clips at every step: its norm comes from the sums over the ranks, and the step multiplies.
`scale` also unscales before that. `apart` and `scale apart` do the same in passes of their own, as
for gradients that a script also holds under another name. The optimizer phase is unscale_,
clip_grad_norm_ and step; backward is timed beside it, as the squares are taken there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zshard
from benchmarks import harness
from benchmarks.harness import Sample, Spread
from benchmarks.sides import SEED
from zshard import FSDP, _core

BASE, CLIP, APART, SCALE, SCALE_APART = "step", "clip", "apart", "scale", "scale apart"
TARGETS = {CLIP: 1.1, SCALE: 1.1}
"""Side -> largest allowed median of its optimizer phase / BASE's."""
BYTES = 30
"""Bytes per element that these sides may read and write."""

MODULE = "benchmarks.clipping"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Time clipping and the step."
    parser = harness.parser(purpose, 2, rounds="timed steps per side (default: 15; --quick: 3)")
    parser.add_argument("--layers", type=int, help="linear layers (default: 5; --quick: 2)")
    parser.add_argument("--width", type=int, help="their width (default: 2048; --quick: 512)")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps (default: 3)")
    args = parser.parse_args(argv)
    args.layers = args.layers or (2 if args.quick else 5)
    args.width = args.width or (512 if args.quick else 2048)
    args.rounds = args.rounds or (3 if args.quick else 15)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        harness.measure_as_rank(args, lambda: measure(args), show)
        return
    flags = harness.flags_of(args, "layers", "width", "rounds", "warmup")
    harness.finish(args, "clipping", [harness.collect(MODULE, args.ranks, flags)])


class Training:
    """One side: a model, its optimizer, and the bytes of its last optimizer phase."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        torch.manual_seed(SEED)
        layers = [nn.Linear(args.width, args.width) for _ in range(args.layers)]
        self.name, self.bytes = name, 0
        self.scaler = zshard.GradScaler(enabled=name in (SCALE, SCALE_APART))
        self.model = FSDP(nn.Sequential(*layers))
        self.optimizer = zshard.AdamW(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn(8, args.width, generator=harness.generator())
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def turn(self, number: int) -> tuple[float, float]:
        """Return the seconds of the optimizer phase, and of backward."""
        self.optimizer.zero_grad()
        loss = self.model(self.inputs).square().sum()
        begin = time.perf_counter()
        self.scaler.scale(loss).backward()
        backward = time.perf_counter() - begin
        params = self.model.parameters() if self.name in (APART, SCALE_APART) else ()
        second_names = [zshard.to_local(p.grad) for p in params if p.grad is not None]
        dist.barrier()
        passed, begin = _core.bytes_passed(), time.perf_counter()
        self.scaler.unscale_(self.optimizer)
        if self.name != BASE:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        phase = time.perf_counter() - begin
        self.scaler.update()
        del second_names
        self.bytes = _core.bytes_passed() - passed
        return phase, backward


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train with all sides in turn and return the JSON record. Collective."""
    names = (BASE, CLIP, APART, SCALE, SCALE_APART)
    sides = {name: Training(name, args) for name in names}
    turns = {name: side.turn for name, side in sides.items()}
    samples = harness.interleave(turns, args.rounds, args.warmup)
    same = all(
        torch.equal(zshard.to_local(mine), zshard.to_local(theirs))
        for name in (APART, SCALE, SCALE_APART)
        for mine, theirs in zip(
            sides[CLIP].model.parameters(), sides[name].model.parameters(), strict=True
        )
    )
    return {
        "parameters": args.layers * args.width * (args.width + 1),
        "ranks": dist.get_world_size(),
        "same_bits": all(harness.of_all_ranks(same)),
        "sides": {name: summarize(side, samples) for name, side in sides.items()},
    }


def summarize(side: Training, samples: Mapping[str, list[Sample]]) -> Any:
    mine = samples[side.name]
    clean = harness.clean_rounds(mine)
    return {
        "ms": Spread.of([mine[i].times[0] * 1e3 for i in clean]).as_dict(),
        "backward_ms": Spread.of([mine[i].times[1] * 1e3 for i in clean]).as_dict(),
        "ratio": Spread.of(harness.same_round_ratios(mine, samples[BASE])).as_dict(),
        "contended": sum(map(harness.contended, mine)),
        "bytes_per_element": sum(harness.of_all_ranks(side.bytes))
        / sum(harness.of_all_ranks(side.parameters)),
    }


def show(result: Mapping[str, Any]) -> None:
    rows = [
        [
            name,
            Spread(**side["ms"]).text(1),
            Spread(**side["ratio"]).text(2),
            harness.verdict(side["ratio"]["median"], TARGETS.get(name)),
            f"{side['bytes_per_element']:.1f}",
            harness.verdict(side["bytes_per_element"], BYTES if name in TARGETS else None),
            Spread(**side["backward_ms"]).text(1),
            str(side["contended"]),
        ]
        for name, side in result["sides"].items()
    ]
    title = (
        f"{result['parameters'] / 1e6:.0f} M parameters, {result['ranks']} ranks; bits of those "
        f"that clip {'equal' if result['same_bits'] else 'DIFFER'}"
    )
    header = [
        *("side", "ms min/med/max", f"x {BASE}", "target", "bytes/element", "target"),
        *("backward ms", "contended"),
    ]
    harness.print_table(title, header, rows)


if __name__ == "__main__":
    harness.start(main)
