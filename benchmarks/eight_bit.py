"""8-bit moments: held-out losses of several seeds beside 32 bits, a step's time, bytes per element.

    python -m benchmarks.eight_bit [--steps 300] [--seeds 3] [--sides float32] [--elements 50000000]
    python -m benchmarks.curves                # draws the losses into docs/images

Losses: a GPT of examples/gpt.py on the sources of Python's standard library, in one process. The
optimizers start from the same weights and see the same batches; only seeds differ. Sharding does
not change the bits (tests/optim/test_eight_bit_sharded.py), so one process stands for all. In
bfloat16, parameters and their gradients are bfloat16; activations are float32 on all sides, because
CPUs without instructions for bfloat16 emulate its products. With a float32 copy, AdamW steps the
copy, and the forward reads it rounded to bfloat16. Linear codes are the control.

Times: the sides take turns, on tensors of their own, so that no side finds another's in the cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zshard
from benchmarks import harness
from benchmarks.harness import Spread
from benchmarks.linear_codes import LinearAdamW

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from corpus import held_out_batches, load, train_batches
from gpt import GPT, Config

F32, BF16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Side:
    """An optimizer, the dtype of the parameters it steps, and of those that the forward reads."""

    stepped: torch.dtype
    read: torch.dtype
    cls: type[torch.optim.Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)

    def optimizer(self, params: Sequence[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
        return self.cls(params, **options, **self.options)


BASE, COPY = "AdamW, float32", "AdamW, bfloat16 with a float32 copy"
LINEAR = "AdamW, linear 8-bit codes"
SIDES = {
    BASE: Side(F32, F32, zshard.AdamW),
    "AdamW8bit, float32": Side(F32, F32, zshard.AdamW8bit),
    COPY: Side(F32, BF16, zshard.AdamW),
    "AdamW8bit, bfloat16, master": Side(BF16, BF16, zshard.AdamW8bit, {"master": "int8"}),
    "AdamW8bit, bfloat16": Side(BF16, BF16, zshard.AdamW8bit),
    "AdamW, bfloat16 stochastic": Side(BF16, BF16, zshard.AdamW, {"stochastic_rounding": True}),
    "AdamW, bfloat16 to nearest": Side(BF16, BF16, zshard.AdamW),
    LINEAR: Side(F32, F32, LinearAdamW),
}
TIMED = [name for name in SIDES if name not in (COPY, LINEAR)]
CONFIG = Config(layers=4, width=128, heads=4, context=128)
BENCHMARK = "eight-bit"
LR, BATCH, HELD_OUT, EVERY = 2e-3, 8, 64, 20


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Compare AdamW8bit with AdamW: losses, time, bytes."
    parser = harness.parser(purpose, rounds="samples per side (default: 9; --quick: 3)")
    parser.add_argument("--steps", type=int, help="of each training (default: 300; --quick: 20)")
    parser.add_argument("--seeds", type=int, help="trainings per side (default: 3; --quick: 1)")
    parser.add_argument("--sides", default="", help="train only sides with this in their name")
    parser.add_argument("--elements", type=int, help="per step (default: 50 M; --quick: 2 M)")
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2], help="(default: 1 2)")
    args = parser.parse_args(argv)
    args.steps = args.steps or (20 if args.quick else 300)
    args.seeds = args.seeds or (1 if args.quick else 3)
    args.elements = args.elements or (2_000_000 if args.quick else 50_000_000)
    args.rounds = args.rounds or (3 if args.quick else 9)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    times = {threads: step_times(args, threads) for threads in args.threads}
    torch.set_num_threads(max(args.threads, default=torch.get_num_threads()))
    text = load()
    sides = [name for name in SIDES if args.sides in name]
    curves: dict[str, list[Curve]] = {name: [] for name in sides}
    for seed in range(args.seeds):
        for name in sides:
            curves[name].append(train(SIDES[name], text, seed, args.steps))
            print(f"seed {seed}: {name}: held-out loss {curves[name][-1][-1][1]:.4f}", flush=True)
    show(curves, times)
    harness.finish(args, BENCHMARK, [{"curves": curves, "times": times}])


# --- losses ---------------------------------------------------------------------------------------

Curve = list[tuple[int, float]]
"""Steps and held-out losses, in nats per byte."""


def train(side: Side, text: tuple[torch.Tensor, torch.Tensor], seed: int, steps: int) -> Curve:
    """Return the held-out loss of every 20th step and of the last."""
    torch.manual_seed(seed)
    model = GPT(CONFIG).to(side.stepped)
    optimizer = side.optimizer(list(model.parameters()), lr=LR)
    batches = train_batches(text[0], BATCH, CONFIG.context, seed=seed, rank=0)
    curve = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 20, 0.05 + (steps - step) / steps)
        loss = loss_of(model, side.read, next(batches))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            curve.append((step + 1, held_out_loss(model, side.read, text[1])))
    return curve


@torch.no_grad()
def held_out_loss(model: nn.Module, read: torch.dtype, text: torch.Tensor) -> float:
    batches = held_out_batches(text, BATCH, CONFIG.context, HELD_OUT, rank=0, world=1)
    found = [loss_of(model, read, batch).item() for batch in batches]
    return sum(found) / len(found)


def loss_of(
    model: nn.Module, read: torch.dtype, batch: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return the loss computed in float32 from parameters of dtype `read`, as are gradients."""
    params = {name: param.to(read).to(F32) for name, param in model.named_parameters()}
    loss: torch.Tensor = torch.func.functional_call(model, params, batch)
    return loss


# --- times and bytes ------------------------------------------------------------------------------


def step_times(args: argparse.Namespace, threads: int) -> dict[str, dict[str, Any]]:
    """Return each side's milliseconds per step, its ratio to BASE, and its bytes per element."""
    torch.set_num_threads(threads)
    optimizers = {name: optimizer_of(name, args.elements) for name in TIMED}
    for optimizer in optimizers.values():
        optimizer.step()
    seconds: dict[str, list[float]] = {name: [] for name in TIMED}
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
    side = SIDES[name]
    param = nn.Parameter(torch.randn(elements).to(side.stepped))
    param.grad = torch.randn(elements).to(side.stepped)
    return side.optimizer([param])


def bytes_of(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameter and state."""
    ((param, state),) = optimizer.state.items()
    return sum(each.nbytes for each in (param, *state.values()) if each.dim())


def show(
    curves: Mapping[str, Sequence[Curve]], times: Mapping[int, Mapping[str, dict[str, Any]]]
) -> None:
    rows = [[name, *(f"{curve[-1][1]:.4f}" for curve in own)] for name, own in curves.items()]
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
    harness.start(main)
