"""How far is each library's norm for clipping from the exact one, in units in the last place?

    python -m benchmarks.norms [--steps 20] [--layers 4] [--width 256] [--max-norm 0.5]

All sides train the same GPT on the same batches, with AdamW in float32, and clip in each step by
torch.nn.utils.clip_grad_norm_. The exact norm is that of the side's own gradients, in float64. An
error is (norm - exact) / the distance of two neighboring float32 numbers there. With --max-norm 1e9
nothing is clipped, and all losses equal DDP's.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import zshard
from benchmarks import harness, models
from benchmarks.sides import Side, build_side

SIDES = ("ddp", "fsdp2", "zshard-full_shard", "zshard-shard_grad_op", "zshard-no_shard")
MODULE = "benchmarks.norms"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser("Compare norms for clipping with the exact norm.", 2)
    parser.add_argument("--steps", type=int, help="training steps (default: 20; --quick: 3)")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the GPT (default: 4)")
    parser.add_argument("--width", type=int, help="its width (default: 256; --quick: 64)")
    parser.add_argument("--max-norm", type=float, default=0.5, help="clip to it (default: 0.5)")
    args = parser.parse_args(argv)
    args.steps = args.steps or (3 if args.quick else 20)
    args.width = args.width or (64 if args.quick else 256)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        harness.measure_as_rank(args, lambda: measure(args), show)
        return
    flags = harness.flags_of(args, "steps", "layers", "width", "max_norm")
    harness.finish(args, "norms", [harness.collect(MODULE, args.ranks, flags)])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train each side alone and return the JSON record. Collective."""
    gpt = models.gpt("gpt", args.layers, args.width, seq=64, rows=4)
    sides = {name: train(build_side(name, gpt), args) for name in SIDES}
    for side in sides.values():
        pairs = zip(side["losses"], sides["ddp"]["losses"], strict=True)
        side["loss_difference"] = max(abs(mine - theirs) / theirs for mine, theirs in pairs)
    return {
        "model": f"GPT, {args.layers} x {args.width}",
        "parameters": gpt.parameters(),
        "ranks": dist.get_world_size(),
        "max_norm": args.max_norm,
        "sides": sides,
    }


def train(side: Side, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the side's norms, their errors, and this rank's losses, one of each per step."""
    assert side.optimizer is not None
    generator = harness.generator()
    norms, errors, losses = [], [], []
    for _ in range(args.steps):
        loss = side.forward(side.workload.batch(generator))
        loss.backward()  # type: ignore[no-untyped-call]
        exact = math.sqrt(sum(squares(p.grad) for p in side.module.parameters()))
        norm = full(torch.nn.utils.clip_grad_norm_(side.module.parameters(), args.max_norm))
        side.optimizer.step()
        side.zero_grad()
        norms.append(norm.item())
        errors.append((norm.item() - exact) / last_place(exact))
        losses.append(loss.item())
    return {"norms": norms, "errors": errors, "losses": losses}


def squares(grad: Tensor | None) -> float:
    """Return the sum of the squares of a full gradient, in float64. Collective."""
    return 0.0 if grad is None else full(grad).double().square().sum().item()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else zshard.full_tensor(tensor)


def last_place(value: float) -> float:
    """Return the distance of the float32 numbers at `value`: 24 bits."""
    return math.ldexp(1.0, math.frexp(value)[1] - 24)


def show(result: Mapping[str, Any]) -> None:
    rows = [
        [
            name,
            f"{max(map(abs, side['errors'])):.2f}",
            " ".join(f"{error:+.1f}" for error in side["errors"][:3]),
            str(sum(norm > result["max_norm"] for norm in side["norms"])),
            f"{side['loss_difference']:.1e}",
        ]
        for name, side in result["sides"].items()
    ]
    steps, millions = len(result["sides"]["ddp"]["norms"]), result["parameters"] / 1e6
    what = f"{result['model']}, {millions:.1f} M parameters, {result['ranks']} ranks, {steps} steps"
    title = f"{what}; errors in units in the last place"
    header = ["side", "largest error", "of steps 1 to 3", "steps clipped", "loss - ddp's"]
    harness.print_table(title, header, rows)


if __name__ == "__main__":
    harness.start(main)
