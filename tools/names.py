"""Write docs/names.md: what each public name of FSDP1, FSDP2, DDP and DeepSpeed's engine is here.

    python tools/names.py           # writes the page
    python tools/names.py --check   # tells what is missing or too much, and exits with 1 if so

The one idea: the names come from the installed torch, by dir() and signatures, and the entries from
`names_table.py`; the two must have the same keys. DeepSpeed's names are data, as it need not be
installed (`names_of_engine.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from names_of_engine import THEIRS, VERSION, rows
from names_table import NAMES, Entry
from torch import nn
from torch.distributed.fsdp import sharded_grad_scaler, wrap

PAGE = Path(__file__).resolve().parent.parent / "docs" / "names.md"
DDP = nn.parallel.DistributedDataParallel
PRIVATE = "Names with an underscore that scripts use"

HEAD = """\
# The names of FSDP1, FSDP2, DDP and DeepSpeed's engine

Import these names from `zshard` instead of `torch.distributed.fsdp` and `torch.nn.parallel`, and
policies from `zshard.wrap`. torch's own enums, configs and policies are accepted as arguments, and
equal zshard's.

`make names` writes this page from torch {torch}. A test fails if torch has a name that is not here.

- *works*: as in torch; the test shows it.
- *no effect*: accepted and checked. It chooses between ways to the same numbers.
- *error*: an AttributeError, NotImplementedError or TypeError that says what to use.

Other names that begin with an underscore are torch's internals, and an AttributeError in zshard.

Attributes give way to a module's own: if your model has a `rank`, `model.rank` is yours.

The last two tables are of the engine that [`zshard.initialize()`](deepspeed.md) returns, and have
each public name of the DeepSpeedEngine of DeepSpeed {deepspeed}.
"""


def table_problems() -> list[str]:
    """What torch has and the table lacks, and the other way round."""
    found = []
    for section, theirs in (names_of_torch() | THEIRS).items():
        ours = set((NAMES | rows())[section])
        found += [f"{section}: {name} is not in the table" for name in sorted(theirs - ours)]
        found += [f"{section}: torch has no {name}" for name in sorted(ours - theirs)]
    private = set(NAMES[PRIVATE])
    known = private_names()
    return found + [f"{PRIVATE}: torch has no {name}" for name in sorted(private - known)]


def names_of_torch() -> dict[str, set[str]]:
    """The public names of torch, by the sections of the table."""
    one, two = (_instance(make) for make in (_fsdp1, DDP))
    return {
        "torch.distributed.fsdp": {*fsdp.__all__, *_classes(fsdp)},
        "Enums and dataclasses": set(_members(fsdp)),
        "torch.distributed.fsdp.wrap": set(wrap.__all__),
        "torch.distributed.fsdp.sharded_grad_scaler": {
            name
            for name, value in _public_items(sharded_grad_scaler)
            if inspect.isclass(value) and value.__module__ == sharded_grad_scaler.__name__
        },
        "FullyShardedDataParallel: arguments": _arguments(fsdp.FullyShardedDataParallel.__init__),
        "FullyShardedDataParallel: methods": _methods(fsdp.FullyShardedDataParallel)
        | {"__getitem__"},
        "FullyShardedDataParallel: attributes": _public(one),
        "fully_shard: arguments": _arguments(fsdp.fully_shard),
        "FSDPModule: methods": _public(vars(fsdp.FSDPModule)),
        "DistributedDataParallel: arguments": _arguments(DDP.__init__),
        "DistributedDataParallel: methods": _methods(DDP),
        "DistributedDataParallel: attributes": _public(two) | {"module"},
    }


def private_names() -> set[str]:
    """The other names of torch's wrappers, but for those that each Python object or module has."""
    names = {*_instance(_fsdp1), *_instance(DDP), "_fsdp_wrapped_module"}
    for kind in (fsdp.FullyShardedDataParallel, fsdp.FSDPModule, DDP):
        names |= {*dir(kind)}
    names -= {*dir(nn.Module), *vars(nn.Linear(1, 1)), *dir(object)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def _public(names: Iterable[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def _public_items(module: Any) -> list[tuple[str, Any]]:
    return [(name, vars(module)[name]) for name in sorted(_public(vars(module)))]


def _classes(module: Any) -> set[str]:
    """What the module shows besides its submodules."""
    return {n for n in _public(dir(module)) if not inspect.ismodule(getattr(module, n))}


def _members(module: Any) -> Iterator[str]:
    """The fields of dataclasses, the members of enums, the methods of handles."""
    for name in _classes(module):
        kind = getattr(module, name)
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            yield from (f"{name}.{member}" for member in kind.__members__)
        elif dataclasses.is_dataclass(kind):
            yield from (f"{name}.{field.name}" for field in dataclasses.fields(kind))
        elif name == "UnshardHandle":
            yield from (f"{name}.{method}" for method in _public(vars(kind)))


def _arguments(function: Callable[..., Any]) -> set[str]:
    return {*inspect.signature(function).parameters} - {"self"}


def _methods(kind: type) -> set[str]:
    """What the class has and nn.Module lacks, or has otherwise."""
    return {
        name
        for name in _public(dir(kind))
        if getattr(kind, name) is not getattr(nn.Module, name, None)
    }


def _fsdp1(module: nn.Module) -> nn.Module:
    cpu = torch.device("cpu")
    return fsdp.FullyShardedDataParallel(module, device_id=cpu, use_orig_params=True)


def _instance(make: Callable[[nn.Module], nn.Module]) -> set[str]:
    """The names in a wrapper's __dict__ that a module's lacks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {*vars(make(nn.Linear(1, 1)))} - {*vars(nn.Linear(1, 1))}


def page() -> str:
    lines = [HEAD.format(torch=".".join(torch.__version__.split(".")[:2]), deepspeed=VERSION)]
    for section, entries in (NAMES | rows()).items():
        lines += [
            f"## {section}",
            "",
            "| name | status | note or remedy | test |",
            "|---|---|---|---|",
        ]
        for name, entry in entries.items():
            lines.append(_row(name, entry))
        lines.append("")
    return "\n".join(lines)


def _row(name: str, entry: Entry) -> str:
    return f"| `{name}` | {entry.status} | {entry.note or '-'} | {entry.test or '-'} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/names.md.")
    parser.add_argument("--check", action="store_true", help="tell what is wrong; write nothing")
    problems = table_problems()
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        problems.append("docs/names.md is not up to date: run `make names`")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
