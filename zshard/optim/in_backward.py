"""optimizer_in_backward(): each unit is stepped as soon as its gradients are reduced.

C knows when a unit may change (csrc/reduce/in_backward.h) and calls back here; the
optimizer then steps that unit's parameters as step() would, with the same options, state and
arithmetic. The result is bit-identical to a step() after backward, and only the gradients of one
unit are in memory at a time.

The model owns the handle; the handle owns the optimizers; C refers to the handle weakly. Nothing
refers from a parameter back to its model, so everything is freed with the model.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zshard import _core
from zshard.optim.hooks import know
from zshard.optim.sharded_state import params_of
from zshard.optim.step import InOneCall
from zshard.optim.step_digest import note_step
from zshard.units.extensions import EXTENSIONS, refuse_writes
from zshard.units.moment import REPLACED, refuse
from zshard.units.shards import context_of, ids_of
from zshard.units.units import Hook, State, hook_forward, units_of

_handles: weakref.WeakKeyDictionary[nn.Module, list[OptimizerInBackward]]
_handles = weakref.WeakKeyDictionary()
"""The active handles, by the module that optimizer_in_backward was called on."""

_OVER, _BEGIN = -1, -2  # must match csrc/python/py_in_backward.c


class OptimizerInBackward:
    """The handle that `model.optimizer_in_backward(...)` returns; remove() undoes the call."""

    def __init__(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if any(state.options.micro_batches for _, state in units_of(module)):
            raise NotImplementedError(
                "optimizer_in_backward() does not support deterministic='any-world': call "
                "optimizer.step() after a step's last backward"
            )
        states = [state for _, state in units_of(module)]
        refuse_writes((state.unit for state in states), "optimizer_in_backward()")
        for each in optimizers:
            if not isinstance(each, InOneCall):
                raise TypeError(
                    "optimizer_in_backward() expects zshard.AdamW, Adam or SGD, got "
                    f"{type(each).__module__}.{type(each).__qualname__}"
                )
        self._optimizers: list[Any] = list(optimizers)
        for optimizer in self._optimizers:
            know(optimizer)
        self._module = weakref.ref(module)
        self._units: list[_core.Unit] = []
        self._states = states[:1]  # of the model
        self._parts: list[list[tuple[Any, int, list[Tensor]]]] = []
        """For each unit: (optimizer, index of its param group, parameters)."""
        self._hooks: list[tuple[State, Hook, RemovableHandle]] = []
        self._stepped: set[InOneCall] = set()  # in this backward
        self._ids: set[int] = set()
        self._scaled: int | None = None  # torch's id of the last backward of a scaled loss
        self._known = list(map(ids_of, self._optimizers))
        groups = _groups_of(self._optimizers)
        try:
            for unit_module, state in units_of(module):
                self._attach(unit_module, state, groups)
        except BaseException:
            self.remove()
            raise
        if not self._units:
            raise ValueError(
                "optimizer_in_backward(): the optimizer has none of the model's parameters: pass "
                "model.parameters() to it after FSDP(...)"
            )
        _handles.setdefault(module, []).append(self)

    def remove(self) -> None:
        """Undo optimizer_in_backward(): later backwards keep `.grad` for optimizer.step().

        May be called more than once. Raises RuntimeError during a backward.
        """
        for unit in self._units:
            unit.step_by_hand()
        for state, hook, handle in self._hooks:
            handle.remove()
            state.hooks.remove(hook)
        self._units, self._hooks = [], []
        module = self._module()
        if module is not None and self in _handles.get(module, ()):
            _handles[module].remove(self)

    def _attach(self, module: nn.Module, state: State, groups: dict[int, tuple[Any, int]]) -> None:
        unit = state.unit
        stepped = {i: groups[id(p)] for i, p in enumerate(unit.params) if id(p) in groups}
        if not stepped:
            return
        for each in EXTENSIONS:
            each.check_in_backward(state)
        parts: dict[tuple[int, int], tuple[Any, int, list[Tensor]]] = {}
        for i, (optimizer, group) in stepped.items():
            part = parts.setdefault((id(optimizer), group), (optimizer, group, []))
            part[2].append(unit.params[i])
        unit.step_in_backward(weakref.WeakMethod(self._step), len(self._units), set(stepped))
        self._units.append(unit)
        self._parts.append(list(parts.values()))
        self._ids.update(id(unit.params[i]) for i in stepped)
        if not unit.is_hooked:  # on a single rank, forward needs nothing else
            handles = hook_forward(module, unit)
            hooks = state.note_hooks(module, handles)
            self._hooks += [(state, *pair) for pair in zip(hooks, handles, strict=True)]

    def _step(self, index: int) -> None:
        """Called by C within backward: step the unit `index`, or handle _BEGIN or _OVER."""
        if index == _BEGIN:
            task = torch._C._current_graph_task_id()
            if task == self._scaled:
                raise _no_scaler()
            refuse(self._states, "step", REPLACED)
            if list(map(ids_of, self._optimizers)) != self._known:
                raise RuntimeError(
                    "the optimizer's param groups have other parameters than when "
                    "optimizer_in_backward() was called: remove() its handle, and call it again"
                )
            for optimizer in self._optimizers:
                context = context_of(optimizer)
                if context.in_backward[0] != task:
                    context.in_backward = task, set(), set()
                context.in_backward[1].add(id(self))
        elif index == _OVER:
            for optimizer in self._optimizers:
                _, handles, groups = context_of(optimizer).in_backward
                handles.discard(id(self))
                if groups and not handles:
                    optimizer._end_units(groups)
            for optimizer in self._stepped:
                note_step(optimizer, self._units[0].engine_id)
                know(optimizer, in_step=True)
            self._stepped.clear()
        else:
            for optimizer, group, params in self._parts[index]:
                optimizer._step_unit(group, index, params)
                context_of(optimizer).in_backward[2].add(group)
                self._stepped.add(optimizer)


def refuse_clipping(params: Iterable[Tensor] | None = None) -> None:
    """Raise RuntimeError if any of `params` (None: of any model) is stepped in backward."""
    if _any_steps(params):
        raise RuntimeError(
            "no gradients to clip: optimizer_in_backward() has stepped with them; call remove() on "
            "the handle, or clip by value in p.register_post_accumulate_grad_hook()"
        )


def watch_scaled(outputs: Tensor | Iterable[Any]) -> Any:
    """Make a backward from `outputs`, one or more scaled losses, an error if it steps a model."""
    if isinstance(outputs, Tensor):
        if _handles and outputs.requires_grad:
            outputs.register_hook(_note_scaled)  # type: ignore[no-untyped-call]
        return outputs
    if isinstance(outputs, list | tuple):
        for output in outputs:
            watch_scaled(output)
        return outputs
    return map(watch_scaled, outputs)  # an iterator, as torch's scale() made it


def _note_scaled(_grad: Tensor) -> None:
    for handle in itertools.chain(*_handles.values()):
        handle._scaled = torch._C._current_graph_task_id()


def refuse_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError if a scaler is to unscale gradients with which a backward has stepped."""
    if _any_steps(params_of(optimizer)):
        raise _no_scaler()


def _no_scaler() -> RuntimeError:
    return RuntimeError(
        "optimizer_in_backward() does not support GradScaler, which would check for inf too late: "
        "call remove() on the handle, or train in bfloat16, which needs no loss scaling"
    )


def is_stepped_in_backward(module: nn.Module) -> bool:
    """Return whether a handle steps parameters of the module."""
    return _any_steps(module.parameters())


def _any_steps(params: Iterable[Tensor] | None) -> bool:
    active = list(itertools.chain(*_handles.values()))
    if not active or params is None:
        return bool(active)
    ids = {id(param) for param in params}
    return any(not ids.isdisjoint(handle._ids) for handle in active)


def _groups_of(optimizers: Sequence[Any]) -> dict[int, tuple[Any, int]]:
    """Return, by the id of each parameter, its optimizer and the index of its group. Raises
    ValueError for a parameter that appears twice."""
    by_id: dict[int, tuple[Any, int]] = {}
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) in by_id:
                    raise ValueError(
                        f"optimizer_in_backward(): a parameter of shape {tuple(param.shape)} is in "
                        "two optimizers: pass it to one only"
                    )
                by_id[id(param)] = optimizer, index
    return by_id
