"""The plan of loading an optimizer's state, from whatever source.

A full tensor of the state is loaded as its parameter is sharded, so the parameter
tells which elements this rank reads, and into what memory. The plan is made of shapes alone and
changes nothing. take() then makes the memory and reads what is small or of a dtype of its own;
read() reads the shards into place, at once or after the optimizer has accepted the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zshard.guard.slices import plain
from zshard.optim.memory import zeros_side_by_side
from zshard.optim.sharded_state import params_of, scalar_keys
from zshard.state.source import Copy, Source, filled, shard_of
from zshard.state.stand_ins import Pending
from zshard.units.shards import Part, part_of

__all__ = ["OptimizerPlan", "has_parts", "problems_with", "taken"]

Numbered = Mapping[Any, Mapping[Any, Any]]
"""State by the parameters' numbers in a state dict: {0: {"exp_avg": tensor, "step": ...}, ...}."""


@dataclass(frozen=True)
class Taken:
    """In a state dict, in place of a full tensor: what this rank loads of it."""

    value: Any


def taken(optimizer: Optimizer, state: Numbered) -> Numbered:
    """Return the result of take() as the optimizer's load_state_dict() accepts it, which would else
    look for full tensors."""
    if not has_parts(optimizer):
        return state
    return {n: {key: Taken(value) for key, value in own.items()} for n, own in state.items()}


def has_parts(optimizer: Optimizer) -> bool:
    return any(part_of(param) is not None for param in params_of(optimizer))


def problems_with(
    params: Mapping[Any, Tensor], state: Numbered, same_dtypes: bool = False
) -> list[str]:
    """Return what is wrong with the state of each parameter: its tensors must be full, or have no
    dimensions.

    same_dtypes: full ones must have the parameter's dtype, to which torch would silently cast them.
    """
    problems, wrong_dtypes, looks_cut = [], [], False
    for number, entries in state.items():
        part = part_of(params[number])
        for key, value in entries.items() if part is not None else ():
            if part is None or not isinstance(value, Tensor):
                continue
            shape, where = tuple(value.shape), f"'{key}' of parameter '{part.name}'"
            if is_traceable_wrapper_subclass(value):
                problems.append(
                    f"{where} is a {type(value).__name__}: pass a plain tensor (full_tensor())"
                )
            elif shape not in (part.shape, ()):
                problems.append(f"{where} has shape {shape}, expected {part.shape} or ()")
                looks_cut |= len(shape) == max(len(part.shape), 1) and set(shape[1:]) <= {1}
            if shape == part.shape != () and value.dtype != part.dtype and not _keeps_dtype(value):
                wrong_dtypes.append(f"{where} has dtype {value.dtype}, expected {part.dtype}")
    if looks_cut:
        problems.append(
            "these may be shards saved by an older zshard: load them with that version, at the "
            "world size that saved them; this version saves full tensors"
        )
    return problems + wrong_dtypes if same_dtypes else problems


class _Entry(NamedTuple):
    """A value of a parameter's state."""

    number: Any
    param: Tensor
    key: Any
    full: Any
    part: Part | None  # this rank's of a full tensor; None: it loads the value as it is

    @property
    def own(self) -> Any:
        """What this rank loads of it."""
        return self.full if self.part is None else shard_of(self.part, self.full)

    @property
    def has_place(self) -> bool:
        """Whether it is read into memory like the parameter's, which is of the same dtype."""
        return self.part is not None and self.key != "step" and not _keeps_dtype(self.full)


class OptimizerPlan:
    """What loading `state` into parameters will do on this rank. No tensor of the state becomes the
    optimizer's, since later steps would write to it."""

    def __init__(self, params: Mapping[Any, Tensor], state: Numbered) -> None:
        """params: all of the optimizer's, in its order. They are resharded, as between steps; see
        Part.settle() for what it raises."""
        for param in params.values():
            part = part_of(param)
            if part is not None:
                part.settle(param)
        found = [(n, p, part_of(p), state[n]) for n, p in params.items() if n in state]
        scalars = scalar_keys(
            (part.shape if part else tuple(p.shape), e) for _, p, part, e in found
        )

        def cut(part: Part | None, key: Any, value: Any) -> Part | None:
            is_full = isinstance(value, Tensor) and part is not None and value.shape == part.shape
            return part if is_full and (value.dim() > 0 or key not in scalars) else None

        self._entries = [
            _Entry(n, param, key, entries[key], cut(part, key, entries[key]))
            for n, param, part, entries in found
            for key in entries
        ]
        self._numbers = [n for n, *_ in found]
        self._pieces: list[tuple[_Entry, Tensor]] = []
        """Shards and their places, which read() fills."""
        self._kept: list[tuple[_Entry, Tensor]] = []
        """Values in a dtype that the optimizer's load_state_dict() would cast."""

    def pending(self) -> list[Pending]:
        """What this rank will read."""
        return [each.own for each in self._entries if isinstance(each.full, Pending)]

    @plain()
    @torch.no_grad()
    def take(self, source: Source | None, live: Mapping[Any, Any] | None = None) -> Numbered:
        """Return the state to load. It has memory for shards, which read() fills.

        live: the optimizer's current state, to be overwritten where it fits.
        """
        places = self._places({} if live is None else live)
        state: dict[Any, dict[Any, Any]] = {number: {} for number in self._numbers}
        for at, entry in enumerate(self._entries):
            own = state[entry.number]
            if at in places:
                own[entry.key] = places[at]
                self._pieces.append((entry, places[at]))
            elif isinstance(entry.full, Taken):
                own[entry.key] = entry.full.value
            else:
                own[entry.key] = filled(entry.own, source)
            if _keeps_dtype(entry.full):
                own[entry.key] = own[entry.key].to(entry.param.device)
                self._kept.append((entry, own[entry.key]))
        return state

    def _places(self, live: Mapping[Any, Any]) -> dict[int, Tensor]:
        """Memory for shards, by the entry's index: adjacent for each key, so that a step runs
        through it at once, or what there is, if it is right for all parameters."""
        members: dict[Any, list[int]] = {}
        for at, entry in enumerate(self._entries):
            if entry.has_place:
                members.setdefault(entry.key, []).append(at)
        found: dict[int, Tensor] = {}
        for key, own in members.items():
            params = [self._entries[at].param for at in own]
            places = [live.get(param, {}).get(key) for param in params]
            if not all(_is_place(p, param) for p, param in zip(places, params, strict=True)):
                places = zeros_side_by_side(params)
            found.update(zip(own, places, strict=True))
        return found

    def adopt(self, optimizer: Optimizer) -> None:
        """Have read() fill what the optimizer has made of the result of take(). Raises RuntimeError
        if it has no place for a shard."""
        for entry, value in self._kept:
            if entry.key in optimizer.state[entry.param]:  # torch has cast it
                optimizer.state[entry.param][entry.key] = value
        for at, (entry, _) in enumerate(self._pieces):
            place = optimizer.state[entry.param].get(entry.key)
            if not _is_place(place, entry.param):
                raise RuntimeError(
                    f"zshard.load() cannot read '{entry.key}' in place: load_state_dict() of "
                    f"{type(optimizer).__name__} or one of its hooks replaced it"
                )
            self._pieces[at] = entry, place

    @plain()
    @torch.no_grad()
    def read(self, source: Source | None) -> None:
        """Read all shards."""
        for entry, place in self._pieces:
            Copy(place, entry.own).carry_out(source)


def _is_place(value: Any, param: Tensor) -> bool:
    """Return whether this rank's shard of a state tensor can be read into `value`."""
    part = part_of(param)
    return (
        isinstance(value, Tensor)
        and part is not None
        and tuple(value.shape) == part.local_shape
        and value.dtype == param.dtype
        and value.device == param.device
        and not torch.is_inference(value)
    )


def _keeps_dtype(value: Any) -> bool:
    return isinstance(value, Pending) and value.keeps_dtype
