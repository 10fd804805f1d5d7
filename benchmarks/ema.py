"""EMA: one update of moving averages, compared with torch's ways over the same shards.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.ema --out FILE
    python -m benchmarks.ema [--elements 50000000] [--layers 200] [--rounds 15]

Each side moves float32 averages of one decay towards the same parameters of an FSDP(...) model:
`zshard` by EMA.update(); `lerp` by a loop of lerp_() over parameters, as scripts write it;
`foreach` by torch._foreach_lerp_() over plain views of the same memory; `averaged` by
AveragedModel.update_parameters() of a copy of the model. `two decays` is EMA.update() of two
averages, `two passes` that of two EMAs of one each.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zshard
from benchmarks import harness
from benchmarks.harness import Spread
from zshard.guard.slices import plain

OURS = "zshard"
DECAY = 0.999

Update = Callable[[], Any]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Time an update of moving averages by zshard and by torch."
    parser = harness.parser(purpose, ranks=2, rounds="samples per side (default: 15; --quick: 3)")
    parser.add_argument("--warmup", type=int, default=2, help="untimed samples (default: 2)")
    parser.add_argument("--elements", type=int, help="of the model (default: 50 M; --quick: 1 M)")
    parser.add_argument("--layers", type=int, default=200, help="linear layers (default: 200)")
    args = parser.parse_args(argv)
    args.elements = args.elements or (1_000_000 if args.quick else 50_000_000)
    args.rounds = args.rounds or (3 if args.quick else 15)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    if harness.under_torchrun():
        with harness.process_group():
            result, rank = measure(args), torch.distributed.get_rank()
        if rank == 0:
            show(result)
        if rank == 0 and args.out:
            harness.write_json(args.out, result)
        return
    flags = harness.flags_of(args, "elements", "layers", "rounds", "warmup")
    results = [harness.collect("benchmarks.ema", args.ranks, flags)]
    harness.finish(args, "ema", results)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Time all sides and return the JSON record."""
    width = round((args.elements / args.layers) ** 0.5)
    model = zshard.FSDP(nn.Sequential(*(nn.Linear(width, width) for _ in range(args.layers))))
    updates = sides_of(model)
    turns = {name: turn_of(update) for name, update in updates.items()}
    samples = harness.interleave(turns, args.rounds, args.warmup)
    elements = sum(zshard.to_local(param).numel() for param in model.parameters())
    sides = {}
    for name in samples:
        seconds = [samples[name][i].times[0] for i in harness.clean_rounds(samples[name])]
        averages = 2 if name.startswith("two") else 1
        ratios = harness.same_round_ratios(samples[OURS], samples[name])
        sides[name] = {
            "averages": averages,
            "ms": Spread.of([1e3 * s for s in seconds]).as_dict(),
            "zshard_ratio": None if name == OURS else Spread.of(ratios).as_dict(),
        }
    parameters = len(list(model.parameters()))
    return {"elements": elements, "parameters": parameters, "sides": sides}


def sides_of(model: nn.Module) -> dict[str, Update]:
    """Return each side's update, after its first one, which copies."""
    one, both = zshard.EMA(model, DECAY), zshard.EMA(model, (DECAY, 0.9999))
    apart = [zshard.EMA(model, decay) for decay in both.decays]
    twin = copy.deepcopy(model)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    @torch.no_grad()
    def lerp() -> None:
        for mean, value in zip(twin.parameters(), model.parameters(), strict=True):
            mean.lerp_(value, 1 - DECAY)

    @torch.no_grad()
    @plain()
    def foreach() -> None:
        pairs = ([p.detach() for p in each.parameters()] for each in (twin, model))
        torch._foreach_lerp_(*pairs, 1 - DECAY)

    updates: dict[str, Update] = {
        OURS: one.update,
        "lerp": lerp,
        "foreach": foreach,
        "averaged": lambda: averaged.update_parameters(model),
        "two decays": both.update,
        "two passes": lambda: [each.update() for each in apart],
    }
    for update in updates.values():
        update()
    return updates


def turn_of(update: Update) -> harness.Turn:
    """Return a turn of one update."""

    def turn(_number: int) -> tuple[float, ...]:
        begin = time.perf_counter()
        update()
        return (time.perf_counter() - begin,)

    return turn


def show(result: Mapping[str, Any]) -> None:
    """Print the table."""
    rows = []
    for name, side in result["sides"].items():
        ratio = side["zshard_ratio"]
        rows.append(
            [name, Spread(**side["ms"]).text(2), Spread(**ratio).text(3) if ratio else ""],
        )
    title = f"an update, {result['elements']:,} elements in {result['parameters']} parameters"
    harness.print_table(f"{title} (min/median/max)", ["side", "ms", "zshard / side"], rows)


if __name__ == "__main__":
    harness.start(main)
