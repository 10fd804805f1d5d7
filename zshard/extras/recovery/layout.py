"""Layout of a kept run's state: this rank's shards and optimizer state in memory files.

The layout goes to the keeper with descriptors of the files, so that another process can read them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zshard import api
from zshard.api import move_together, params_of, part_of, plain, units_of

KeptPlace = tuple[str, int, int]
"""A tensor's name, and where its bytes lie: a descriptor of the process that has it, and an
offset."""


@dataclass
class KeptLayout:
    """params: this rank's shards, by name. state: "<parameter> <name>", likewise. files: the
    descriptors, in the order in which the keeper has them. model, optimizer: what they are, to be
    compared with those of the next process."""

    params: list[KeptPlace] = field(default_factory=list)
    state: list[KeptPlace] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    model: list[str] = field(default_factory=list)
    optimizer: str = ""


def named_shards(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's shard of each parameter of the model's units, with its name."""
    for _, state in units_of(model):
        yield from zip(state.names, state.unit.params, strict=True)


def names_of(optimizer: Optimizer) -> dict[int, str]:
    """Return the optimizer's parameters by id, with their names. Raises ValueError for one that no
    FSDP(...) has wrapped."""
    names = {}
    for index, param in enumerate(params_of(optimizer)):
        part = part_of(param)
        if part is None:
            text = f"parameter {index} of the optimizer, of shape {tuple(param.shape)}"
            raise ValueError(f"{text}, is in no FSDP(...) model: wrap the module that has it")
        names[id(param)] = part.name
    return names


def state_tensors(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer's state tensors but for counters, as "<parameter> <name>"."""
    names = names_of(optimizer)
    for param in params_of(optimizer):
        for key, value in sorted(optimizer.state.get(param, {}).items()):
            if isinstance(value, Tensor) and value.dim() > 0:
                yield f"{names[id(param)]} {key}", value


def model_facts(model: nn.Module, comm: api.Comm) -> list[str]:
    """Return what must be the same for shards to fit: a line for each parameter, and the ranks."""
    parts = (part_of(param) for _, param in named_shards(model))
    facts = (f"{p.name} {p.shape} {p.dtype} {p.numel} from {p.begin}" for p in parts if p)
    return sorted([f"{comm.world} ranks, this is rank {comm.rank}", *facts])


def optimizer_facts(optimizer: Optimizer) -> str:
    """Return the optimizer's class and which parameters are in which group."""
    names = names_of(optimizer)
    groups = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    digest = hashlib.sha256(json.dumps(groups).encode()).hexdigest()[:16]
    return f"{type(optimizer).__name__} {[len(group) for group in groups]} {digest}"


@plain()
def layout_of(model: nn.Module, optimizer: Optimizer, comm: api.Comm) -> KeptLayout:
    """Return where all of it lies now."""
    layout = KeptLayout(model=model_facts(model, comm), optimizer=optimizer_facts(optimizer))
    layout.params = list(_places(named_shards(model)))
    layout.state = list(_places(state_tensors(optimizer)))
    layout.files = sorted({fd for _, fd, _ in (*layout.params, *layout.state)})
    return layout


def _places(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[KeptPlace]:
    for name, tensor in tensors:
        place = api.kept_place(tensor.detach())
        if place is not None:
            yield name, *place
        elif tensor.numel() > 0:
            raise ValueError(
                f"'{name}' was replaced, so it is not in kept memory: write into it instead"
            )


@plain()
def own_state(optimizer: Optimizer) -> None:
    """Move state that the optimizer has loaded into kept memory."""
    values = [value for _, value in state_tensors(optimizer) if value.numel() > 0]
    if loose := [value for value in values if api.kept_place(value.detach()) is None]:
        move_together(loose, None)


Counters = list[list[tuple[str, Tensor, str]] | None]
"""For each parameter its counters: name, tensor of one number, dtype. None: it has no state."""


@plain()
def counters_of(optimizer: Optimizer) -> Counters:
    """Return the state that state_tensors() leaves out."""
    return [
        [
            (name, value, str(value.dtype).removeprefix("torch."))
            for name, value in entries.items()
            if isinstance(value, Tensor) and value.dim() == 0
        ]
        if (entries := optimizer.state.get(param))
        else None
        for param in params_of(optimizer)
    ]


def values_of(counters: Counters) -> list[dict[str, Any] | None]:
    """Return the counters' numbers and dtypes, by name."""
    return [
        None if of_param is None else {key: (value.item(), dtype) for key, value, dtype in of_param}
        for of_param in counters
    ]
