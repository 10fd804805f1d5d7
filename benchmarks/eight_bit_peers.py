"""8-bit AdamW of zshard, bitsandbytes, torchao and FlashOptim: a step's time, bytes of state.

    python -m benchmarks.eight_bit_peers [--elements 4000000]

Of the other libraries, those that are installed take part; a library that raises an error is a row
with that error. Each side steps parameters of its own, all start equal and have the same gradients,
and the sides take turns. Times are CPU time of one thread, which other programs disturb less than
what the clock says.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import zshard
from benchmarks import harness
from benchmarks.eight_bit import CONFIG, GPT
from benchmarks.harness import Spread

BENCHMARK, WARM_UP = "eight-bit-peers", 5
BASE = "zshard.AdamW"


def bitsandbytes(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params, lr=1e-3)


def torchao(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, lr=1e-3)


def flashoptim(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    from flashoptim import FlashAdamW

    return FlashAdamW(params, lr=1e-3)


SIDES: dict[str, Callable[[Sequence[Tensor]], torch.optim.Optimizer]] = {
    BASE: lambda params: zshard.AdamW(params, lr=1e-3),
    "zshard.AdamW8bit": lambda params: zshard.AdamW8bit(params, lr=1e-3),
    "bitsandbytes": bitsandbytes,
    "torchao": torchao,
    "flashoptim": flashoptim,
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser(
        "Compare 8-bit AdamW of several libraries on CPUs.",
        rounds="samples per side (default: 9; --quick: 3)",
    )
    parser.add_argument("--elements", type=int, help="of the tensor (default: 4 M; --quick: 64 Ki)")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (3 if args.quick else 9)
    args.elements = args.elements or (1 << 16 if args.quick else 4_000_000)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(1)
    results = []
    for problem, shapes in problems(args.elements).items():
        sides = compare(shapes, args.rounds)
        show(f"{problem} (min/median/max)", sides)
        results.append({"problem": problem, "sides": sides})
    versions = {name: version_of(name) for name in ("bitsandbytes", "torchao", "flashoptim")}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    harness.finish(args, BENCHMARK, [{"versions": versions}, *results])


def version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def problems(elements: int) -> dict[str, list[torch.Size]]:
    """Return the shapes of each problem's parameters."""
    rows = torch.Size((elements // 1024, 1024))
    return {
        f"one tensor of {rows.numel():,} elements": [rows],
        f"GPT of {CONFIG.parameter_count():,}": [each.shape for each in GPT(CONFIG).parameters()],
    }


def compare(shapes: Sequence[torch.Size], rounds: int) -> dict[str, dict[str, Any]]:
    """Return each side's times, ratios to BASE and bytes of state per element, or its error."""
    optimizers, found = {}, {}
    for name, make in SIDES.items():
        try:
            optimizers[name] = started(make, shapes)
        except Exception as error:  # whatever the library raises is its result
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(rounds):
        for name in harness.rotated(list(optimizers), number):
            begin = time.process_time()
            optimizers[name].step()
            seconds[name].append(time.process_time() - begin)
    elements = sum(shape.numel() for shape in shapes)
    for name, own in seconds.items():
        ratios = [mine / base for mine, base in zip(own, seconds[BASE], strict=True)]
        found[name] = {
            "ms": Spread.of([1e3 * each for each in own]).as_dict(),
            "ratio": Spread.of(ratios).as_dict(),
            "bytes": sum(map(state_bytes, optimizers[name].state.values())) / elements,
        }
    return found


def started(
    make: Callable[[Sequence[Tensor]], torch.optim.Optimizer], shapes: Sequence[torch.Size]
) -> torch.optim.Optimizer:
    """Return an optimizer after its first steps, in which torchao compiles."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer = make(params)
    for _ in range(WARM_UP):
        optimizer.step()
    return optimizer


def state_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a parameter's state, those inside of others too."""
    if isinstance(value, Mapping):
        return sum(map(state_bytes, value.values()))
    if hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return sum(state_bytes(getattr(value, name)) for name in names)
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def show(title: str, sides: Mapping[str, Mapping[str, Any]]) -> None:
    rows = []
    for name, own in sides.items():
        if "error" in own:
            rows.append([name, own["error"], "", ""])
        else:
            ms, ratio = (Spread(**own[key]) for key in ("ms", "ratio"))
            rows.append([name, ms.text(1), ratio.text(2), f"{own['bytes']:.3f}"])
    harness.print_table(
        title, ["side", "ms of CPU time", f"/ {BASE}", "bytes of state per element"], rows
    )


if __name__ == "__main__":
    harness.start(main)
