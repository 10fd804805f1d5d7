"""8-bit moments: held-out losses of several seeds beside 32 bits, a step's time, bytes per element.

    python -m benchmarks.eight_bit [--steps 300] [--seeds 3] [--sides float32] [--elements 50000000]

Losses: a GPT of examples/gpt.py on the sources of Python's standard library, in one process. The
optimizers start from the same weights and see the same batches; only seeds differ. Sharding does
not change the bits (tests/optim/test_eight_bit.py), so one process stands for all. Beside AdamW8bit
there are AdamW in float32, in bfloat16 to nearest and stochastically rounded.

Times: the sides take turns, on tensors of their own, so that no side finds another's in the cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zshard
from benchmarks import harness
from benchmarks.harness import Spread

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from corpus import held_out_batches, load, train_batches
from gpt import GPT, Config

BF16 = torch.bfloat16
BASE = "AdamW, float32"
SIDES: dict[str, tuple[torch.dtype, type[torch.optim.Optimizer], dict[str, Any]]] = {
    BASE: (torch.float32, zshard.AdamW, {}),
    "AdamW8bit, float32": (torch.float32, zshard.AdamW8bit, {}),
    "AdamW, bfloat16 to nearest": (BF16, zshard.AdamW, {}),
    "AdamW, bfloat16 stochastic": (BF16, zshard.AdamW, {"stochastic_rounding": True}),
    "AdamW8bit, bfloat16": (BF16, zshard.AdamW8bit, {}),
    "AdamW8bit, bfloat16, master": (BF16, zshard.AdamW8bit, {"master": "int8"}),
}
CONFIG = Config(layers=4, width=128, heads=4, context=128)
LR, BATCH, HELD_OUT = 2e-3, 8, 64


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Compare AdamW8bit with AdamW: losses, time, bytes."
    parser = harness.parser(purpose, rounds="samples per side (default: 9; --quick: 3)")
    parser.add_argument("--steps", type=int, help="of each training (default: 300; --quick: 20)")
    parser.add_argument("--seeds", type=int, help="trainings per side (default: 3; --quick: 1)")
    parser.add_argument("--sides", default="", help="train only sides with this in their name")
    parser.add_argument("--elements", type=int, help="per step (default: 50 M; --quick: 2 M)")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="(default: 1 2)")
    args = parser.parse_args(argv)
    args.steps = args.steps or (20 if args.quick else 300)
    args.seeds = args.seeds or (1 if args.quick else 3)
    args.elements = args.elements or (2_000_000 if args.quick else 50_000_000)
    args.rounds = args.rounds or (3 if args.quick else 9)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    times = {threads: step_times(args, threads) for threads in args.threads}
    torch.set_num_threads(max(args.threads))
    text = load()
    sides = [name for name in SIDES if args.sides in name]
    losses: dict[str, list[float]] = {name: [] for name in sides}
    curves: dict[str, list[float]] = {}
    for seed in range(args.seeds):
        for name in sides:
            curve, held_out = train(name, text, seed, args.steps)
            losses[name].append(held_out)
            curves.setdefault(name, curve)
            print(f"seed {seed}: {name}: held-out loss {held_out:.4f}", flush=True)
    show(losses, times)
    if args.out:
        result = {"losses": losses, "times": times, "curves": curves, "steps": args.steps}
        harness.write_json(args.out, result)


# --- losses ---------------------------------------------------------------------------------------


def train(
    name: str, text: tuple[torch.Tensor, torch.Tensor], seed: int, steps: int
) -> tuple[list[float], float]:
    """Return the training loss of every tenth step, and the held-out loss at the end, in nats."""
    dtype, cls, options = SIDES[name]
    torch.manual_seed(seed)
    model = GPT(CONFIG).to(dtype)
    optimizer = cls(model.parameters(), lr=LR, **options)  # type: ignore[call-arg]
    batches = train_batches(text[0], BATCH, CONFIG.context, seed=seed, rank=0)
    curve = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 20, 0.05 + (steps - step) / steps)
        loss = loss_of(model, *next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve += [loss.item()] if step % 10 == 0 else []
    with torch.no_grad():
        batches = held_out_batches(text[1], BATCH, CONFIG.context, HELD_OUT, rank=0, world=1)
        found = [loss_of(model, *batch).item() for batch in batches]
    return curve, sum(found) / len(found)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(inputs).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- times and bytes ------------------------------------------------------------------------------


def step_times(args: argparse.Namespace, threads: int) -> dict[str, dict[str, Any]]:
    """Return each side's milliseconds per step, its ratio to BASE, and its bytes per element."""
    torch.set_num_threads(threads)
    optimizers = {name: optimizer_of(name, args.elements) for name in SIDES}
    for optimizer in optimizers.values():
        optimizer.step()
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(args.rounds):
        for name, optimizer in optimizers.items():
            begin = time.perf_counter()
            optimizer.step()
            seconds[name].append(time.perf_counter() - begin)
    found = {}
    for name, own in seconds.items():
        ratios = [mine / base for mine, base in zip(own, seconds[BASE], strict=True)]
        found[name] = {
            "ms": Spread.of([1e3 * each for each in own]).as_dict(),
            "ratio": Spread.of(ratios).as_dict(),
            "bytes": bytes_of(optimizers[name]) / args.elements,
        }
    return found


def optimizer_of(name: str, elements: int) -> torch.optim.Optimizer:
    dtype, cls, options = SIDES[name]
    param = nn.Parameter(torch.randn(elements).to(dtype))
    param.grad = torch.randn(elements).to(dtype)
    return cls([param], **options)  # type: ignore[call-arg]


def bytes_of(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameter and state."""
    ((param, state),) = optimizer.state.items()
    return sum(each.nbytes for each in (param, *state.values()) if each.dim())


def show(
    losses: Mapping[str, Sequence[float]], times: Mapping[int, Mapping[str, dict[str, Any]]]
) -> None:
    rows = [[name, *(f"{loss:.4f}" for loss in own)] for name, own in losses.items()]
    seeds = [f"seed {seed}" for seed in range(len(rows[0]) - 1)]
    harness.print_table("Held-out loss, nats per byte", ["side", *seeds], rows)
    for threads, sides in times.items():
        rows = [
            [name, Spread(**o["ms"]).text(1), Spread(**o["ratio"]).text(2), f"{o['bytes']:.3f}"]
            for name, o in sides.items()
        ]
        title = f"A step, {threads} threads (min/median/max)"
        harness.print_table(title, ["side", "ms", f"/ {BASE}", "bytes per element"], rows)


if __name__ == "__main__":
    main()
