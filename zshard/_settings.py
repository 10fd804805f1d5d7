"""What an optimizer steps with, as ranks compare it: its param groups, and how often it stepped.

The one idea: a scheduler that one rank calls alone leaves shards that were stepped with different
learning rates. So each step notes two digests, which travel with what ranks exchange anyway
(csrc/engine/history.h). Numbers may differ in their last digits between hosts; each digest rounds
them in its own way, so numbers that are nearly equal agree in one of the two. The values themselves
travel only once ranks have found that they differ.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zshard._guard import plain
from zshard._parts import Stepped, stepped_by

__all__ = ["note_step"]

_NEAR = 1e-6
"""Numbers that differ by more than this, relative to themselves, are different."""

_HOW = frozenset(("foreach", "fused", "capturable", "differentiable"))
"""Options that say how a step is computed, and not what: hosts may differ in them."""

_MASK = (1 << 64) - 1

Values = tuple[tuple[str, Any], ...]


class _Account:
    """What is known of an optimizer that steps a model."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.values: list[Values] | None = None
        self.digests = 0, 0
        self.lines = ""
        self.text = ""

    def take(self, values: list[Values]) -> None:
        """Digest the settings, if they are new."""
        if values == self.values:
            return
        self.values = values
        cells = [tuple(_cells(value)) for group in values for _, value in group]
        self.digests = _digest([a for a, _ in cells]), _digest([b for _, b in cells])
        self.lines = "".join(_lines(self.label, values))


_accounts: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, _Account]]
_accounts = weakref.WeakKeyDictionary()
"""For each optimizer, by the ranks of the models that it steps."""


def note_step(optimizer: torch.optim.Optimizer, engine_id: int | None = None) -> None:
    """Tell the models (or one of them) that the optimizer has stepped, and with what."""
    for model in stepped_by(optimizer):
        unit = model.unit
        if unit is None or engine_id not in (None, unit.engine_id):
            continue
        account = _account_of(optimizer, model.comm_id)
        with plain():
            account.take(_settings(optimizer, model, sharded=not unit.replicated))
            steps = _state_steps(optimizer, model)
        unit.engine.note_step(*(_with_steps(digest, steps) for digest in account.digests))
        account.text = f"{account.lines}{account.label} step count\t{_listed(steps)}\n"
        unit.engine.tell_settings(_all_texts(model.comm_id))


def _account_of(optimizer: torch.optim.Optimizer, comm_id: int) -> _Account:
    accounts = _accounts.setdefault(optimizer, {})
    if comm_id not in accounts:
        name = type(optimizer).__name__
        others = sum(
            type(other).__name__ == name and comm_id in theirs
            for other, theirs in _accounts.items()
        )
        accounts[comm_id] = _Account(name if others == 0 else f"{name} #{others + 1}")
    return accounts[comm_id]


def _all_texts(comm_id: int) -> str:
    return "".join(each[comm_id].text for each in _accounts.values() if comm_id in each)


# --- what there is --------------------------------------------------------------------------------


def _settings(optimizer: torch.optim.Optimizer, model: Stepped, *, sharded: bool) -> list[Values]:
    """The options of each param group that has parameters of the model, without tensors on GPUs.

    Where every rank has the whole model, optimizers may share out the parameters among ranks."""
    keys = [key for key in optimizer.defaults if key not in _HOW]
    found = []
    for number, _, n in model.groups:
        group = optimizer.param_groups[number]
        options = [(key, _value(group.get(key))) for key in keys]
        found.append((*options, ("number of parameters", n if sharded else 0)))
    return found


def _value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, list | tuple):
        return tuple(_value(each) for each in value)
    return value if isinstance(value, bool | int | float | str) else None


def _state_steps(optimizer: torch.optim.Optimizer, model: Stepped) -> list[int]:
    """The step count in the state of each group's first parameter; 0: none is known."""
    steps = []
    for number, first, _ in model.groups:
        state = optimizer.state.get(optimizer.param_groups[number]["params"][first], {})
        step = _value(state.get("step")) if isinstance(state, dict) else None
        steps.append(int(step) if isinstance(step, int | float) else 0)
    return steps


# --- digests --------------------------------------------------------------------------------------


def _cells(value: Any) -> tuple[str, str]:
    """A value rounded in two ways."""
    if isinstance(value, tuple):
        pairs = [_cells(each) for each in value]
        return repr([a for a, _ in pairs]), repr([b for _, b in pairs])
    if not isinstance(value, float) or value == 0.0 or not math.isfinite(value):
        return repr(value), repr(value)
    place = math.log(abs(value)) / _NEAR
    sign = "-" if value < 0 else ""
    return f"{sign}{math.floor(place)}", f"{sign}{math.floor(place + 0.5)}"


def _digest(cells: list[str]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(cells).encode(), digest_size=8).digest(), "little")


def _with_steps(digest: int, steps: list[int]) -> int:
    for step in steps:
        digest = (digest * 0x100000001B3 + step) & _MASK
    return digest


# --- words ----------------------------------------------------------------------------------------


def _lines(label: str, values: list[Values]) -> Iterator[str]:
    """A line for each option, with its values in all groups."""
    for column in zip(*values, strict=True):
        if any(value is not None for _, value in column):
            yield f"{label} {column[0][0]}\t{_listed([value for _, value in column])}\n"


def _listed(values: list[Any]) -> str:
    """One value if all are the same, else the values of all groups."""
    texts = [_text(value) for value in values]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_text(each) for each in value)})"
    return f"{value:.9g}" if isinstance(value, float) else str(value)
