"""Steps of torch's optimizers on shards, against the same on plain parameters of the same sizes.

    python -m benchmarks.torch_steps [--width 256] [--layers 60] [--rounds 15]

torch's elementwise optimizers step shards as they are: what they cost beyond plain tensors is what
zshard adds around and within a step. Each rank steps this rank's shards of a stack of linear
layers, and copies of them that no model owns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zshard
from benchmarks import harness
from benchmarks.harness import Sample, Spread
from benchmarks.sides import SEED
from zshard import FSDP

MODULE = "benchmarks.torch_steps"
LIMIT = 1.05
"""Largest median of shards / plain parameters that counts as equal."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-9),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-9, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-9, fused=True),
    "SGD foreach": lambda params: torch.optim.SGD(params, lr=1e-9, momentum=0.9, foreach=True),
    "RMSprop foreach": lambda params: torch.optim.RMSprop(params, lr=1e-9, foreach=True),
    "Adagrad foreach": lambda params: torch.optim.Adagrad(params, lr=1e-9, foreach=True),
    "Adamax foreach": lambda params: torch.optim.Adamax(params, lr=1e-9, foreach=True),
    "zshard.AdamW": lambda params: zshard.AdamW(params, lr=1e-9),
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Time torch's optimizers on shards and on plain parameters."
    parser = harness.parser(purpose, 2, rounds="timed steps per side (default: 15; --quick: 3)")
    parser.add_argument("--layers", type=int, help="linear layers (default: 60; --quick: 4)")
    parser.add_argument("--width", type=int, default=256, help="their width (default: 256)")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps (default: 3)")
    args = parser.parse_args(argv)
    args.layers = args.layers or (4 if args.quick else 60)
    args.rounds = args.rounds or (3 if args.quick else 15)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        harness.measure_as_rank(args, lambda: measure(args), show)
        return
    flags = harness.flags_of(args, "layers", "width", "rounds", "warmup")
    harness.finish(args, "torch-steps", [harness.collect(MODULE, args.ranks, flags)])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Time each optimizer on both sides in turn; return the JSON record. Collective."""
    torch.manual_seed(SEED)
    layers = [nn.Linear(args.width, args.width) for _ in range(args.layers)]
    model = FSDP(nn.Sequential(*layers))
    model(torch.randn(8, args.width)).square().mean().backward()
    shards = list(model.parameters())
    plain = [nn.Parameter(zshard.to_local(param).clone()) for param in shards]
    for param, shard in zip(plain, shards, strict=True):
        param.grad = None if shard.grad is None else zshard.to_local(shard.grad).clone()
    return {
        "layers": args.layers,
        "width": args.width,
        "ranks": dist.get_world_size(),
        "optimizers": {
            name: compare(make(shards), make(plain), args) for name, make in OPTIMIZERS.items()
        },
    }


def compare(
    ours: torch.optim.Optimizer, plain: torch.optim.Optimizer, args: argparse.Namespace
) -> Any:
    def turn_of(optimizer: torch.optim.Optimizer) -> harness.Turn:
        def turn(_number: int) -> tuple[float]:
            begin = time.perf_counter()
            optimizer.step()
            return (time.perf_counter() - begin,)

        return turn

    turns = {"shards": turn_of(ours), "plain": turn_of(plain)}
    samples = harness.interleave(turns, args.rounds, args.warmup)
    return {
        **{name: Spread.of(milliseconds(each)).as_dict() for name, each in samples.items()},
        "ratio": Spread.of(
            harness.same_round_ratios(samples["shards"], samples["plain"])
        ).as_dict(),
        "contended": sum(map(harness.contended, samples["shards"])),
    }


def milliseconds(samples: Sequence[Sample]) -> list[float]:
    return [samples[i].times[0] * 1e3 for i in harness.clean_rounds(samples)]


def show(result: Mapping[str, Any]) -> None:
    rows = [
        [
            name,
            Spread(**each["shards"]).text(2),
            Spread(**each["plain"]).text(2),
            Spread(**each["ratio"]).text(2),
            harness.verdict(each["ratio"]["median"], LIMIT),
            str(each["contended"]),
        ]
        for name, each in result["optimizers"].items()
    ]
    title = (
        f"step() of {2 * result['layers']} parameters, {result['layers']} linear layers of width "
        f"{result['width']}, {result['ranks']} ranks"
    )
    header = ["optimizer", "shards, ms", "plain, ms", "ratio", "limit", "contended"]
    harness.print_table(title, header, rows)


if __name__ == "__main__":
    harness.start(main)
