"""Draw the pictures of docs/concepts.md from what models say on two ranks.

    python docs/tools/pictures.py [--out docs/images]

parameter.svg  one parameter of two ranks: its shapes between steps, in forward and afterwards
units.svg      which units rank 0 has gathered as each module runs, for two strategies
parts.svg      what zshard.predict_memory() says of a model on eight ranks, for each strategy
step-*.svg     who holds what in a step over each transport, and what moves (step_pictures.py)
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import step_pictures
import torch
import torch.distributed as dist
from svg import EMPTY, FAINT, INK, MEMORY, RANKS, WIDTH, Svg
from torch import nn

import zshard
from zshard import FSDP

OUT = Path(__file__).resolve().parents[1] / "images"
PARTS = {name: part for name, part in MEMORY.items() if name != "activations"}
STRATEGIES = ("no_shard", "zero1", "shard_grad_op", "full_shard")


# --- What models say ------------------------------------------------------------------------------


def shapes_of_a_parameter() -> dict[str, Any]:
    """This rank's shapes of a weight, and which elements it has."""
    model = FSDP(nn.Linear(64, 64, bias=False))
    weight = model.weight
    info = zshard.shard_info(weight)
    assert info is not None
    found = {"full": list(info["shape"]), "begin": info["begin"], "numel": info["numel"]}
    found["between"] = list(weight.shape)
    model.register_forward_pre_hook(
        lambda module, _: found.update(within=list(module.weight.shape))
    )
    model(torch.randn(2, 64)).sum().backward()
    found["after"], found["grad"] = list(weight.shape), list(weight.grad.shape)
    return found


def gathered_units(strategy: str) -> list[tuple[str, list[bool]]]:
    """(event, whether each unit is gathered) of a step, over c10d, which gathers by copying."""
    layers = [nn.Linear(64, 64, bias=False) for _ in range(4)]
    units = {"auto_wrap_policy": {nn.Linear}}
    model = FSDP(nn.Sequential(*layers), strategy=strategy, transport="c10d", **units)
    seen: list[tuple[str, list[bool]]] = []

    def look(event: str) -> Any:
        def hook(*_: Any) -> None:
            bytes_ = [layer.weight.untyped_storage().nbytes() for layer in layers]
            seen.append((event, [n == 64 * 64 * 4 for n in bytes_]))

        return hook

    look("before")()
    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(look(f"forward {i}"))
        layer.register_full_backward_hook(look(f"backward {i}"))
    model(torch.randn(2, 64, requires_grad=True)).sum().backward()
    look("after")()
    return seen


def parts_of_memory() -> dict[str, dict[str, dict[str, int]]]:
    """By transport and strategy, the bytes of each part on a rank of eight."""
    with torch.device("meta"):
        layers = [nn.TransformerEncoderLayer(1024, 16, 4096) for _ in range(12)]
        model = nn.Sequential(*layers)
    return {
        transport: {
            strategy: zshard.predict_memory(model, 8, strategy=strategy, transport=transport)
            for strategy in STRATEGIES
        }
        for transport in ("c10d", "shm")
    }


# --- The pictures ---------------------------------------------------------------------------------


def draw_parameter(ranks: list[dict[str, Any]]) -> Svg:
    """A row for each rank; three times in a step, from left to right."""
    full = ranks[0]["full"]
    svg = Svg(330, "One parameter on two ranks: sharded, gathered, sharded")
    svg.text(WIDTH / 2, 24, f"One parameter, a weight of {full[0]} x {full[1]}, on two ranks", 14)
    edge, columns, total = 84, (120, 345, 570), full[0] * full[1]
    names = ("between steps", "in forward and backward", "after backward")
    for x, name in zip(columns, names, strict=True):
        svg.text(x + edge / 2, 50, name, 12, FAINT)
    for row, found in enumerate(ranks):
        y = 64 + 132 * row
        svg.text(40, y + edge / 2 + 4, f"rank {row}")
        top, height = edge * found["begin"] / total, edge * found["numel"] / total
        for x, column in zip(columns, ("between", "within", "after"), strict=True):
            svg.box(x, y, edge, edge, EMPTY)
            if column == "within":
                for colour, each in zip(RANKS, ranks, strict=False):
                    part = edge * each["begin"] / total, edge * each["numel"] / total
                    svg.box(x, y + part[0], edge, part[1], colour)
            else:
                svg.box(x, y + top, edge, height, RANKS[row])
            svg.box(x, y, edge, edge, "none", INK)
            svg.text(x + edge / 2, y + edge + 16, f"weight.shape {tuple(found[column])}", 11)
        shape = f"weight.grad.shape {tuple(found['grad'])}"
        svg.text(columns[2] + edge / 2, y + edge + 31, shape, 11)
        for x, what in zip(columns, ("all-gather", "reduce-scatter"), strict=False):
            svg.arrow(x + edge + 20, y + edge / 2, (x + edge + 120, y + edge / 2))
            svg.text(x + edge + 70, y + edge / 2 - 8, what, 11, FAINT)
    return svg


def draw_units(by_strategy: dict[str, list[tuple[str, list[bool]]]]) -> Svg:
    """A panel for each strategy: a row for each unit, a column for each event."""
    svg = Svg(40 + 172 * len(by_strategy), "Which units are gathered as each module runs")
    svg.text(WIDTH / 2, 24, "Units that rank 0 has gathered, as each module runs", 14)
    for panel, (strategy, seen) in enumerate(by_strategy.items()):
        top, left, step = 62 + 172 * panel, 120, 62
        svg.text(14, top - 12, strategy, 12, INK, "start")
        for i, (event, gathered) in enumerate(seen):
            x = left + step * i
            svg.text(x + step / 2, top - 12, event, 10, FAINT)
            for unit, is_gathered in enumerate(gathered):
                fill = PARTS["slots"][1] if is_gathered else EMPTY
                svg.box(x + 2, top + 30 * unit, step - 4, 24, fill)
        for unit in range(len(seen[0][1])):
            svg.text(100, top + 30 * unit + 16, f"unit {unit}", 11, FAINT, "end")
    return svg


def draw_parts(by_transport: dict[str, dict[str, dict[str, int]]]) -> Svg:
    """A stacked bar for each transport and strategy."""
    svg = Svg(400, "Predicted memory of a rank, by part, for each strategy")
    title = "12 transformer layers, 151 M parameters, Adam, fp32: a rank of eight"
    svg.text(WIDTH / 2, 24, title, 14)
    largest = max(sum(p[n] for n in PARTS) for s in by_transport.values() for p in s.values())
    where = {"c10d": "over c10d, ranks anywhere", "shm": "over shm, ranks of one host"}
    y = 52
    for transport, strategies in by_transport.items():
        svg.text(14, y, where[transport], 12, INK, "start")
        for strategy, parts in strategies.items():
            y += 26
            svg.text(130, y + 1, strategy, 11, FAINT, "end")
            x = 140.0
            for name, (_, colour) in PARTS.items():
                width = 540 * parts[name] / largest
                svg.box(x, y - 13, width, 19, colour)
                x += width
            total = sum(parts[n] for n in PARTS) / 2**20
            svg.text(x + 6, y + 1, f"{total:.0f} MiB", 11, INK, "start")
        y += 40
    for i, (label, colour) in enumerate(PARTS.values()):
        x, row = 14 + 190 * (i % 4), 350 + 24 * (i // 4)
        svg.box(x, row - 10, 11, 11, colour)
        svg.text(x + 17, row, label, 10, FAINT, "start")
    return svg


def work(rank: int, store: str, out: str) -> None:
    """One of two ranks: rank 0 writes what both have seen."""
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, shapes_of_a_parameter())
    units = {strategy: gathered_units(strategy) for strategy in ("full_shard", "shard_grad_op")}
    if rank == 0:
        Path(out).write_text(json.dumps({"ranks": found, "units": units}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="the folder to write to")
    out = parser.parse_args().out
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seen.json"
        torch.multiprocessing.spawn(work, (f"{folder}/store", str(path)), 2)
        seen = json.loads(path.read_text())
    draw_parameter(seen["ranks"]).write(out / "parameter.svg")
    draw_units(seen["units"]).write(out / "units.svg")
    draw_parts(parts_of_memory()).write(out / "parts.svg")
    for name, svg in step_pictures.drawn():
        svg.write(out / name)


if __name__ == "__main__":
    main()
