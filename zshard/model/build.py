"""A model becomes units: each is made, hooked and guarded, and its module gets another class.

The module stays the same object with the same parameters and names; its class becomes
a subclass of (FSDP, its class), and two C callables become its forward hooks. A copy of a model is
built by the same steps.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from zshard import _core
from zshard.guard.outside import tell_of_barriers
from zshard.memory.forward_order import calls_of, parts_to_guard
from zshard.model.copy import copy_plain, copy_slices, without
from zshard.model.generate import generate_of
from zshard.model.merge import merges_of
from zshard.model.whole_counts import counts_of
from zshard.offload import set_offload
from zshard.optim.state_registry import meet
from zshard.precision import (
    drop_root_casts,
    install_casts,
    install_kept,
)
from zshard.ranks.agreement import on_all_ranks, told_to_all_ranks
from zshard.ranks.transports import Comms
from zshard.state.module import attach, attach_replicated
from zshard.units.shards import remember_parts
from zshard.units.units import (
    ATTRIBUTE,
    BufferSync,
    Hook,
    Options,
    State,
    hook_forward,
    is_apart,
    is_unit,
    known_hooks,
    state_of,
    units_of,
    writing,
)
from zshard.wrap import CustomPolicy, plan_units
from zshard.wrap.initial_values import (
    InitialValues,
    dtypes_of,
    names_of,
)
from zshard.wrap.late_parameters import watch
from zshard.wrap.tree import UnitSpec

_HALF = "_zshard_half"  # attribute of a model that is being sharded, or that has failed to be


def build(
    module: nn.Module,
    planned: list[tuple[UnitSpec, Options]],
    comms: Comms,
    values: InitialValues | None = None,
) -> None:
    """Makes the units, children first, the root last; `values` sees to their parameters before."""
    together = contextlib.nullcontext if values is None else lambda: on_all_ranks(comms.all)
    if values is not None:  # an earlier FSDP() may have failed after some ranks had made a unit
        for comm in {id(each): each for each in comms if each is not None}.values():
            comm.align()
    with together():
        engine = _core.Engine(type(module).__name__, *comms)
    engine.set_prefetch(*planned[-1][1].prefetch.ahead)
    engine.keep_gathered(*planned[-1][1].keep)
    engine.set_codes(*planned[-1][1].wire.codes)
    inner = [state.unit for _, state in units_of(module) if not is_apart(state, comms)]
    set_offload(engine, planned[-1][1].offload)
    root = module if len(planned) > 1 else None
    with _begun(module):
        for spec, options in planned:
            if values is None:  # a copy, which ranks need not make at the same time
                _shard(spec, options, engine, comms, root)
                continue
            with on_all_ranks(comms.all):
                values.make(spec)
            with told_to_all_ranks(comms.all):
                values.give(spec)
            with on_all_ranks(comms.all):
                _shard(spec, options, engine, comms, root)
    for nested in inner:
        engine.adopt(nested)
    _make_inner(module)
    _rename_units(module)
    units = [state.unit for _, state in units_of(module) if not is_apart(state, comms)]
    engine.set_order(units)
    with together():
        engine.set_calls(calls_of(module, units))
        engine.reserve()


def _shard(
    spec: UnitSpec, options: Options, engine: _core.Engine, comms: Comms, root: nn.Module | None
) -> None:
    """Makes a module a unit; `root` has others as well, None: it is the only one."""
    unit = _make_unit(engine, spec, options)
    state = State(unit, comms, options)
    remember_parts(state)
    _install(spec, state)
    outermost = root is None or spec.module is root
    casts = install_casts(spec.module, options.precision, outermost)
    state.hooks += known_hooks(spec.module, casts)
    install_kept({owner for ref in spec.params for owner, _ in ref.owners}, options.precision)
    if unit.is_hooked and not unit.replicated:
        state.hooks += _guard_parts(spec, unit, root)
    if not unit.replicated:
        unit.guard()


@contextlib.contextmanager
def _begun(module: nn.Module) -> Iterator[None]:
    """Context manager that marks a model whose parameters FSDP() leaves half-way."""
    module.__dict__[_HALF] = True
    yield
    del module.__dict__[_HALF]


def refuse_half(module: nn.Module) -> None:
    if _HALF in module.__dict__:
        raise RuntimeError(
            f"an earlier FSDP() of this {type(module).__name__} failed after it had begun to "
            "shard it: build the model again, on all ranks"
        )


def _make_unit(engine: _core.Engine, spec: UnitSpec, options: Options) -> _core.Unit:
    params = [ref.param for ref in spec.params]
    places = [
        (i, owner._parameters, attribute)
        for i, ref in enumerate(spec.params)
        for owner, attribute in ref.owners
    ]
    kind = options.strategy.in_group.value
    dtypes = dtypes_of(spec, options)
    return _core.Unit(engine, spec.name, kind, names_of(spec), params, places, *dtypes)


def modules_apart(module: nn.Module, comms: Comms) -> set[nn.Module]:
    """Return the modules of such units."""
    return {each for unit, s in units_of(module) if is_apart(s, comms) for each in unit.modules()}


def inner_comms(module: nn.Module, comms: Comms) -> Comms:
    """What is kept between steps is so for a whole model: inner units that keep decide for it."""
    for _, state in units_of(module):
        if (
            comms.replica_group is None
            and state.comms.replica_group is not None
            and state.comms.all is comms.all
        ):
            return state.comms
    return comms


def _make_inner(root: nn.Module) -> None:
    """Earlier outermost units are inner ones from now on, whose arguments FSDP1 casts by another
    option, and whose steps are measured with the root's."""
    for module, state in units_of(root):
        if module is not root:
            state.spare = None
            dropped = drop_root_casts(module, state.options.precision)
            state.hooks = [hook for hook in state.hooks if hook[1] not in dropped]


def _rename_units(module: nn.Module) -> None:
    """Inner units were named from their own root; from now on it is this one."""
    for name, each in module.named_modules():
        if is_unit(each) and state_of(each).unit.name != name:
            state_of(each).rename(name)


def copy_model(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A sharded model like `model`; ignored parameters and buffers are copied as they are."""
    units = [(module, state) for module, state in units_of(model)]
    own = state_of(model)
    for _, state in units:
        if is_apart(state, own.comms):
            raise NotImplementedError(
                f"cannot copy a model whose unit '{state.unit.name}' has a process group of other "
                "ranks: build and wrap a second model, and load model.state_dict() into it on each "
                "rank"
            )
    own.unit.engine.open()  # what a forward has left whole, in the compute dtype, is resharded
    own.unit.engine.close()
    with without([hook for _, state in units for hook in state.hooks]):
        copied = copy_plain(model, [(module, state.unit) for module, state in units], memo)
    options = {
        id(made): state.options for (_, state), (_, made) in zip(units, copied.units, strict=True)
    }
    policy = CustomPolicy(lambda module: id(module) in options)
    specs = plan_units(copied.module, policy, (), copied.others, with_empty=True)
    build(copied.module, [(spec, options[id(spec.module)]) for spec in specs], own.comms)
    if own.sync_buffers:
        sync_buffers(copied.module, own.sync_buffers)
    if own.comms.all.world > 1:
        others = {id(param) for param in copied.others}
        watch(copied.module, [m for m in copied.module.modules() if _has_own(m, others)])
    if own.spare is not None:
        state_of(copied.module).spare = own.spare.like(copied.module)
    with last_writes(copied.module):
        for unit, made in copied.units:
            copy_slices(unit, state_of(made).unit)
    return copied.module


@contextlib.contextmanager
def last_writes(module: nn.Module) -> Iterator[None]:
    """Within it, a new model is written to; after it, other ranks may evaluate with its shards."""
    state = state_of(module)
    meet(module, state.comms.shards)
    tell_of_barriers(state)
    with writing([state.unit]):
        yield


def _has_own(module: nn.Module, params: set[int]) -> bool:
    return any(id(param) in params for param in module._parameters.values())


def sync_buffers(module: nn.Module, when: BufferSync) -> None:
    """Have a model's buffers broadcast from rank 0 as its forwards begin. A script may replace
    them, so each pass takes those that the modules have then."""
    state = state_of(module)
    state.sync_buffers = when
    if state.comms.all.world == 1:
        return
    root, engine = weakref.ref(module), state.unit.engine
    comms, in_training = state.comms, when == "training"

    def tell() -> None:
        model = root()
        if model is not None:
            apart = {id(b) for each in modules_apart(model, comms) for b in each.buffers()}
            engine.sync_buffers([b for b in model.buffers() if id(b) not in apart], in_training)

    for _, each in units_of(module):
        if not is_apart(each, comms):
            each.unit.buffers = tell


def broadcast_buffers(module: nn.Module) -> None:
    """What the next training forward would do first, for evaluations before it. Collective."""
    state = state_of(module)
    if state.sync_buffers and state.comms.all.world > 1:
        state.unit.engine.broadcast_buffers()


def _install(spec: UnitSpec, state: State) -> None:
    module, unit = spec.module, state.unit
    if unit.is_hooked:
        state.hooks += known_hooks(module, hook_forward(module, unit))
        if unit.replicated:
            attach_replicated(spec)
        else:
            attach(state, spec)
    module.__dict__[ATTRIBUTE] = state
    module.__class__ = class_for(type(module))


def _guard_parts(spec: UnitSpec, unit: _core.Unit, root: nn.Module | None) -> list[Hook]:
    """Has some parts of a unit make it whole as well; returns each of them with a hook."""
    hooks = []
    for part in parts_to_guard(spec, root):
        hooks += known_hooks(part, hook_forward(part, unit))
    return hooks


MADE = "_zshard_made"
"""An attribute of the classes that class_for() makes, which are no subclasses to a model."""

_base: type[Any] = nn.Module  # of the classes of all units: FSDP, once it exists
_classes: dict[type[nn.Module], type[Any]] = {}  # by the class that the module had


def set_base(base: type[Any]) -> None:
    """Have all units be of this class as well."""
    global _base
    _base = base


def class_for(original: type[nn.Module]) -> type[Any]:
    """Return the class of a unit whose module is of class `original`. Raises TypeError if there
    can be none."""
    if original not in _classes:

        def make_plain(cls: type, *args: Any, **kwargs: Any) -> Any:
            """What type(model)(...) makes, as a container does of itself for a slice."""
            return original(*args, **kwargs)

        # Libraries look classes up by __name__ (transformers: is this a causal language model?).
        name, shown = original.__name__, f"FSDP{original.__qualname__}"
        names = {"__module__": original.__module__, "__qualname__": shown, "__new__": make_plain}
        names[MADE] = True
        names |= generate_of(original) | counts_of(original) | merges_of(original)
        _classes[original] = type(name, (_base, original), names)
    return _classes[original]
