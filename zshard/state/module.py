"""state_dict() and load_state_dict() of sharded modules: plain tensors under plain names.

nn.Module walks the modules, names their tensors and reports errors; on each module it calls two
methods, `_save_to_state_dict` and `_load_from_state_dict`. On modules that own sharded parameters,
zshard replaces these methods on the instance, and while they run, placeholders of full shape
replace the parameters. So the module's own code and users' hooks see full tensors only, wherever
the call starts. In saving, the placeholders are full copies, gathered one unit at a time. In
loading, they are shapes without memory, and what nn.Module finally copies is this rank's shard of
each tensor: loading needs no gather, and no rank waits for another.

Why methods and not hooks: a load hook of zshard would have to run after all others, including those
registered later, and a dict of hooks must not be reordered while nn.Module runs them. Nor is there
a hook around an entire call, which lets a unit be gathered once for all its owners. Why instances
and not classes: an owner may be any module below a unit, and its class must stay.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zshard import _core
from zshard.guard.slices import guard_like
from zshard.state.load_state_dict import content_of, note_loads
from zshard.state.source import NotedLoad, planned, shard_of
from zshard.state.stand_ins import (
    FullCopies,
    StandIn,
    StandIns,
    current_copies,
)
from zshard.units.extensions import refuse_writes
from zshard.units.moment import REPLACED, UNSHARDED, is_for_now, refuse
from zshard.units.returned import note_returned, note_used
from zshard.units.shards import Entry, entry_of, part_of
from zshard.units.units import (
    State,
    is_unit,
    session,
    units_of,
    writing,
)
from zshard.wrap.tree import UnitSpec


def attach(state: State, spec: UnitSpec) -> None:
    """Make a unit save and load full parameters, whichever module of it the call starts at."""
    # The unit's module too, even if it owns none: it runs first, so it refuses before a change.
    _places_of(spec.module)
    for ref in spec.params:
        for owner, attribute in ref.owners:
            _places_of(owner)[attribute] = ref.param, state.unit
    for module in spec.module.modules():
        is_top = module is spec.module or is_unit(module)
        is_leaf = not module._modules  # a single call covers it
        if not (
            is_top
            or is_leaf
            or isinstance(module.__dict__.get(_StateDictMethod.name), _StateDictMethod)
        ):
            module.__dict__[_StateDictMethod.name] = _StateDictMethod(module, {})


def attach_replicated(spec: UnitSpec) -> None:
    """Make a replicated unit note what is loaded into it, and copy what a context takes back."""
    for owner in {owner for ref in spec.params for owner, _ in ref.owners}:
        if _note_replicated not in owner._load_state_dict_post_hooks.values():
            owner.register_load_state_dict_post_hook(_note_replicated)  # type: ignore[no-untyped-call]
            owner.register_load_state_dict_pre_hook(_before_replicated)  # type: ignore[no-untyped-call]
            owner.register_state_dict_post_hook(_copy_replicated)  # type: ignore[no-untyped-call]


def _before_replicated(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *lists: object
) -> None:
    """A pre-hook of nn.Module's loading."""
    note_used(state.get(prefix + name) for name in module._parameters)
    _refuse_assignment(metadata)
    _refuse_load(module)


def _copy_replicated(module: nn.Module, state: Any, prefix: str, _metadata: object) -> None:
    """A hook of nn.Module's saving. Aliases of the parameters would lose the values that a context,
    such as ema.swapped(), takes back at its end."""
    for name, param in module._parameters.items():
        part, key = None if param is None else part_of(param), prefix + name
        owner = None if part is None or part.is_cut else part.state
        if owner is not None and key in state and is_for_now(owner):
            state[key] = state[key].detach().clone()


def _refuse_assignment(metadata: dict[str, Any]) -> None:
    if metadata.get("assign_to_params_buffers", False):
        raise ValueError(
            "load_state_dict(assign=True) is not supported: it would replace the parameters that "
            "zshard trains; omit assign to copy values into them"
        )


def _refuse_load(module: nn.Module) -> None:
    """Raise RuntimeError where parameters of the module, or below a unit, may not be loaded now."""
    parts = (part_of(param) for param in module._parameters.values() if param is not None)
    states = [part.state for part in parts if part is not None and part.state is not None]
    states += [state for _, state in units_of(module)] if is_unit(module) else []
    refuse(states, "load", REPLACED)
    refuse((each for each in states if each.summons), "load", UNSHARDED)
    refuse_writes((each.unit for each in states), "load_state_dict()")


def _note_replicated(module: nn.Module, _keys: object) -> None:
    """A post-hook of nn.Module's loading. It does not get the loaded parameters, so it notes all of
    them: the others are unchanged."""
    for param in module._parameters.values():
        part = None if param is None else part_of(param)
        if param is not None and part is not None and not part.is_cut and part.unit is not None:
            note_loads([(part.unit, part.index, content_of(param))])


def whole_state_dict(
    module: nn.Module,
    state_dict: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    keep: bool = True,
) -> Any:
    """Return the result of `state_dict`, the method of `module`, gathering each unit once.

    keep: if False, this rank only takes part: the result has shapes but no values.

    Over shm any rank may call it alone; otherwise it is collective. Raises RuntimeError if a shard
    would get into the result.
    """
    if current_copies.get() is not None:
        return state_dict(*args, **kwargs)
    _reshard_replicas(module)
    cut = [s.unit for _, s in units_of(module) if not s.unit.replicated]
    with contextlib.ExitStack() as opened:
        begin = functools.partial(opened.enter_context, session(cut))
        copies = FullCopies(module.parameters(), begin, keep)
        token = current_copies.set(copies)
        try:
            state = state_dict(*args, **kwargs)
        finally:
            current_copies.reset(token)
    _refuse_shards(state)
    note_returned(copies.owners, state)
    return state


def _reshard_replicas(module: nn.Module) -> None:
    """Restore the between-steps dtype of unsharded parameters where a forward has left a cast copy
    for its backward, which then makes another one. Raises RuntimeError within that forward."""
    for _, state in units_of(module):
        unit = state.unit
        parts = ((param, part_of(param)) for param in unit.params if unit.replicated)
        if any(part is not None and param.dtype != part.dtype for param, part in parts):
            unit.unpin()


def _refuse_shards(state: object) -> None:
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if isinstance(value, torch.Tensor) and _core.is_shard(value):
            raise RuntimeError(
                f"the state dict would contain only this rank's shard of '{key}': tie, parametrize "
                "or share parameters before FSDP(...), and call nn.Module's state_dict() in a "
                "state_dict() of your own"
            )


# --- the methods on instances ---------------------------------------------------------------------


_Places = dict[str, tuple[nn.Parameter, _core.Unit]]
"""An owner's attributes that are parameters of units. No module is held: a submodule that outlives
the model keeps the unit whose memory it uses, and no other modules."""


class _Override:
    """A method of one module, in that module's __dict__."""

    name: str

    def __init__(self, module: nn.Module, places: _Places) -> None:
        self.places = places
        self._module = weakref.ref(module)  # the module holds this: avoid a cycle
        self._patch = module.__dict__.get(self.name)  # an earlier replacement by other code

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise RuntimeError(f"{self.name}() called on a module that no longer exists")
        return module

    def original(self) -> Callable[..., Any]:
        """Return the method that the module would run without this one."""
        if self._patch is not None:
            return self._patch  # type: ignore[no-any-return]
        return types.MethodType(getattr(type(self.module), self.name), self.module)

    def in_use(self) -> dict[str, Entry]:
        """Return the parameters that are still in place, without those that users replaced."""
        there = self.module._parameters
        return {
            name: entry_of(param, unit)
            for name, (param, unit) in self.places.items()
            if there.get(name) is param
        }

    def __reduce__(self) -> Any:
        """Restore the original method in a copy or pickle, which belongs to no unit."""
        return operator.getitem, ((self.original(),), 0)


class _StateDictMethod(_Override):
    """state_dict() of a module that is not a unit."""

    name = "state_dict"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return whole_state_dict(self.module, self.original(), args, kwargs)


class _SaveMethod(_Override):
    """nn.Module's `_save_to_state_dict`, with full copies in the places. Collective."""

    name = "_save_to_state_dict"

    def __call__(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        used = self.in_use()
        params = (entry.value for entry in used.values())
        around = current_copies.get()
        copies = around or FullCopies(params, lambda: None)
        with StandIns(self.module, {name: copies.of(entry) for name, entry in used.items()}):
            self.original()(destination, prefix, keep_vars)
        if around is None:
            note_returned(copies.owners, destination)


class _LoadMethod(_Override):
    """nn.Module's `_load_from_state_dict` for full tensors. Raises ValueError for assign=True;
    wrong shapes are nn.Module's errors, with full shapes."""

    name = "_load_from_state_dict"

    def __call__(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        *lists: list[str],  # missing and unexpected keys, error messages
    ) -> None:
        _refuse_assignment(local_metadata)
        used = self.in_use()
        units = {entry.unit: None for entry in used.values() if entry.unit is not None}
        _refuse_load(self.module)
        note_used(state_dict.get(prefix + name) for name in used)
        loads: list[NotedLoad] = []
        with writing(units if planned.get() is None else ()):
            for unit in units:
                if unit.is_full:  # a forward kept it for its backward, which gathers it again
                    unit.reshard()
            placeholders = {n: StandIn.of(e.value, e.shape, e.name) for n, e in used.items()}
            with StandIns(self.module, placeholders) as stand_ins:
                # Registered now, to run after all other hooks: those see full shapes, and
                # nn.Module, which continues after this hook, sees the shards.
                last = functools.partial(self._cut, stand_ins, loads)
                with self.module._register_load_state_dict_pre_hook(last):  # type: ignore[no-untyped-call]
                    self.original()(state_dict, prefix, local_metadata, strict, *lists)
            note_loads(loads)

    def _cut(
        self,
        stand_ins: StandIns,
        loads: list[NotedLoad],
        state: dict[str, Any],
        prefix: str,
        *rest: Any,
    ) -> None:
        """The last load hook: restore the module's shards, and cut the values to copy into them."""
        stand_ins.end()
        for name, entry in self.in_use().items():
            key = prefix + name
            if key in state:
                value, errors = state[key], len(rest[-1])
                state[key] = _shard_to_copy(entry, key, value, rest[-1])
                is_own = value is entry.value or isinstance(value, StandIn)
                if entry.unit and entry.part and not is_own and len(rest[-1]) == errors:
                    loads.append((entry.unit, entry.part.index, content_of(value)))


def _places_of(module: nn.Module) -> _Places:
    """Return the mutable places of an owner; on the first call, replace its methods."""
    known = module.__dict__.get(_SaveMethod.name)
    if isinstance(known, _SaveMethod):
        return known.places
    places: _Places = {}
    for method in (_SaveMethod, _LoadMethod):
        module.__dict__[method.name] = method(module, places)
    return places


def _shard_to_copy(entry: Entry, key: str, value: Any, error_msgs: list[str]) -> Any:
    """Return what nn.Module must copy into this rank's shard, given a full tensor."""
    if not torch.overrides.is_tensor_like(value):  # type: ignore[no-untyped-call]
        return value  # raises nn.Module's own error
    local, whole = entry.value.detach(), entry.shape
    if isinstance(value, StandIn) and value.origin is entry.value:
        return local
    if value is entry.value:  # torch.distributed.checkpoint's filler for a missing entry
        return local
    if whole == () and tuple(value.shape) == (1,):
        value = value[0]  # nn.Module accepts scalars from old files like this
    if tuple(value.shape) != whole:
        error_msgs.append(
            f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
            f"the shape in current model is {torch.Size(whole)}."
        )
        return local
    if tuple(local.shape) == whole:  # this rank's alone, or the user's `p.data = whole`
        return value
    assert entry.part is not None, "it is in a unit"
    return guard_like(shard_of(entry.part, value), entry.value)
