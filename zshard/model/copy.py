"""copy.deepcopy of a sharded model: another sharded model, for a moving average of weights, say.

Nothing is gathered. The modules are copied with parameters of full shape and no
memory; the copy is wrapped with the same units over the same ranks; and each rank copies its own
shards.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zshard import _core
from zshard.guard.slices import plain
from zshard.units.units import ATTRIBUTE, Hook, without_memory

_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)

_within: ContextVar[bool] = ContextVar("zshard_deepcopy", default=False)


@dataclass(frozen=True)
class Copied:
    """A plain copy of a sharded model.

    module: the copy. units: each unit with the copy of its module. others: copies of parameters
    that belong to no unit.
    """

    module: nn.Module
    units: list[tuple[_core.Unit, nn.Module]]
    others: list[nn.Parameter]


def is_within() -> bool:
    """Return whether an enclosing model is being copied."""
    return _within.get()


@contextlib.contextmanager
def without(hooks: list[Hook]) -> Iterator[None]:
    """Context manager that removes hooks from their modules and restores them in their order."""
    before = []
    for reference, number in hooks:
        module = reference()
        for name in _HOOK_TABLES if module is not None else ():
            table = getattr(module, name)
            if number in table:
                before.append((table, list(table.items())))
                del table[number]
    try:
        yield
    finally:
        for table, items in reversed(before):
            table.clear()
            table.update(items)


def copy_plain(
    root: nn.Module, units: list[tuple[nn.Module, _core.Unit]], memo: dict[int, Any]
) -> Copied:
    """Copy the modules; parameters of `units` get their full shape and no values."""
    held = set()
    for _, unit in units:
        # As they were when the unit was made, which gives the copy's unit the same layout.
        for index, (param, trainable) in enumerate(
            zip(unit.params, unit.was_trainable, strict=True)
        ):
            held.add(id(param))
            made = without_memory(param, unit.param(index)["shape"], param.device)
            memo[id(param)] = made.requires_grad_(trainable)
    token = _within.set(True)
    try:
        copied = copy_module(root, memo)
    finally:
        _within.reset(token)
    for unit in (unit for _, unit in units):
        for param in unit.params:  # their attributes may refer to modules, which are copied by now
            if type(memo[id(param)]) is not nn.Parameter:
                vars(memo[id(param)]).update(copy.deepcopy(vars(param), memo))
    pairs = [(unit, memo[id(module)]) for module, unit in units]
    others = [memo[id(p)] for p in root.parameters() if id(p) not in held]
    return Copied(copied, pairs, others)


def copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy one unit's module, as its original class and without zshard's attributes. Hooks are
    copied: see without()."""
    original: type[nn.Module] = type(module).__bases__[1]
    made = original.__new__(original)
    memo[id(module)] = made
    state = {key: value for key, value in vars(module).items() if not _is_ours(key, value)}
    made.__dict__.update(copy.deepcopy(state, memo))
    return made


def _is_ours(key: str, value: Any) -> bool:
    return key == ATTRIBUTE or type(value).__module__ == "zshard.state.module"


def copy_slices(source: _core.Unit, target: _core.Unit) -> None:
    """Copy this rank's shard of a unit. Raises RuntimeError if the units' parameters or their
    shards differ."""

    def parts(unit: _core.Unit) -> list[tuple[Any, ...]]:
        facts = [unit.param(index) for index in range(unit.n_params)]
        return [(fact["shape"], fact["begin"], fact["numel"]) for fact in facts]

    if parts(source) != parts(target):
        raise RuntimeError(
            f"cannot copy unit '{source.name or '(root)'}': its copy would have different "
            "parameters; do not change modules or tied parameters after FSDP(...)"
        )
    with torch.no_grad(), plain():
        for theirs, ours in zip(source.params, target.params, strict=True):
            ours.copy_(theirs)
            ours.requires_grad_(theirs.requires_grad)
