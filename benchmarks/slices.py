"""Code for whole parameters: what plain PyTorch, DDP, FSDP2 and zshard make of it, as a table.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.slices [--library fsdp2]

Each situation of tests/guard/situations.py runs on a plain model and on a sharded one with the same
values and gradients. "right": what it returns and leaves in the model is the same. "wrong": it is
not, and nothing was raised. Else the exception's class. It is no measurement of time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "guard"))

import situations

import zshard

WIDTH = 64  # wide enough that each rank has some elements of each parameter

Wrap = Callable[[nn.Module], nn.Module]


def plain_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])


def by_fsdp2(model: nn.Module) -> nn.Module:
    for child in model.children():
        fully_shard(child)
    return fully_shard(model)


def by_zshard(strategy: str, transport: str) -> Wrap:
    def wrap(model: nn.Module) -> nn.Module:
        options: dict[str, Any] = {"strategy": strategy, "transport": transport}
        made: nn.Module = zshard.FSDP(model, auto_wrap_policy={nn.Linear}, **options)
        return made

    return wrap


LIBRARIES: dict[str, Wrap] = {
    "plain": lambda model: model,
    "ddp": lambda model: DistributedDataParallel(model).module,
    "fsdp2": by_fsdp2,
    "zshard, shm": by_zshard("full_shard", "shm"),
    "zshard, c10d": by_zshard("full_shard", "c10d"),
    "zshard, no_shard": by_zshard("no_shard", "shm"),
}


def whole(tensor: Any) -> Any:
    """A tensor as it would be of the plain model, where the library can tell."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if isinstance(tensor, Tensor) and hasattr(zshard, "full_tensor"):
        return zshard.full_tensor(tensor)
    return tensor


def parameters_of(model: nn.Module) -> list[Tensor]:
    values = model.state_dict().values()
    return [whole(value.detach()).clone() for value in values]


def outcome(situation: Callable[[nn.Module], Any], model: nn.Module) -> Any:
    """(what it gives, the parameters after it), or the name of the exception."""
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    model(x).square().sum().backward()
    try:
        given = situation(model)
        return whole(given), parameters_of(model)
    except Exception as error:
        return type(error).__name__


def equal(ours: Any, theirs: Any, part: tuple[int, int]) -> bool:
    """Also of a slice whose library does not say that it is one: is it that of the whole?"""
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor):
        return bool(ours is theirs or (not isinstance(theirs, Tensor) and ours == theirs))
    own = theirs.flatten()[part[0] : sum(part)]
    if ours.shape != theirs.shape and ours.numel() == own.numel():
        theirs = own.reshape(ours.shape)
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def verdict(situation: Callable[[nn.Module], Any], wrap: Wrap) -> str:
    expected = outcome(situation, plain_model())
    model = wrap(plain_model())
    info = zshard.shard_info(situations.weight(model)) or {"begin": 0, "numel": -1}
    found = outcome(situation, model)
    if isinstance(found, str) or isinstance(expected, str):
        return str(found) if isinstance(found, str) else "right"
    pairs = zip(found[1], expected[1], strict=True)
    fits = equal(found[0], expected[0], (info["begin"], info["numel"]))
    return (
        "right"
        if fits and all(torch.equal(a, b) or torch.allclose(a, b) for a, b in pairs)
        else "wrong"
    )


def joined(name: str, wrap: Wrap) -> str:
    """What all ranks say together: an exception of one, or wrong on one, counts."""
    mine = verdict({**situations.RIGHT, **situations.REFUSED}[name], wrap)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    raised = [each for each in everyone if each not in ("right", "wrong")]
    return raised[0] if raised else "wrong" if "wrong" in everyone else "right"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--library", nargs="+", choices=sorted(LIBRARIES), default=[*LIBRARIES])
    parser.add_argument("--only", nargs="+", metavar="SITUATION", help="default: all")
    parser.add_argument("--out", type=Path, help="a JSON file: {library: {situation: verdict}}")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    names = args.only or [*situations.RIGHT, *situations.REFUSED]
    found = {
        library: {name: joined(name, LIBRARIES[library]) for name in names}
        for library in args.library
    }
    if dist.get_rank() == 0:
        print("| situation | " + " | ".join(found) + " |\n|" + "---|" * (len(found) + 1))
        for name in names:
            print(f"| {name} | " + " | ".join(each[name] for each in found.values()) + " |")
        if args.out:
            args.out.write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
