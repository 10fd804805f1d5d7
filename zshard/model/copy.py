"""copy.deepcopy of a sharded model: another sharded model, for example for a moving average of
weights.

Nothing is gathered. The modules are copied with parameters of full shape and no memory; the copy is
wrapped with the same units over the same ranks; then each rank copies its own shards.
"""

from __future__ import annotations

import copy
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from zshard import _core
from zshard.guard.slices import plain
from zshard.model.shard_model import ShardingPlan, introduce, sync_buffers
from zshard.ranks.agreement import PublicCall
from zshard.units.extensions import EXTENSIONS
from zshard.units.moment import PASS, UNSHARDED, refuse
from zshard.units.units import (
    ATTRIBUTE,
    class_of,
    state_of,
    units_of,
    without_memory,
    writing,
)
from zshard.wrap import CustomPolicy, plan_units
from zshard.wrap.build import make_engine
from zshard.wrap.late_parameters import watch

_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)

_within: ContextVar[bool] = ContextVar("zshard_deepcopy", default=False)


# A plain copy of a sharded model; each unit with the copy of its module; copies of parameters that
# belong to no unit.
Copied = tuple[nn.Module, list[tuple[_core.Unit, nn.Module]], list[nn.Parameter]]


@PublicCall("copy.deepcopy()")
def copy_model(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a sharded model like `model`; ignored parameters and buffers are copied as they are.

    Within the copy of another model, copies the module alone.
    """
    if _within.get():  # a weak proxy, as trainers have, brings a model that has been copied
        return memo[id(model)] if id(model) in memo else _copy_module(model, memo)
    states, root = [state for _, state in units_of(model)], state_of(model)
    apart = next((state.unit.name for state in states if state.is_apart(root.comms)), None)
    if apart is not None:
        raise NotImplementedError(
            f"cannot copy a model whose unit '{apart}' has a process group of other ranks: load "
            "model.state_dict() into a second model on each rank"
        )
    cut = (state for state in states if not state.unit.replicated)
    refuse(cut, "copy a model", UNSHARDED, PASS)
    root.unit.engine.open()  # reshard what a forward has left unsharded in the compute dtype
    root.unit.engine.close()
    copied, pairs, others = copy_plain(model, memo)
    # Not collective over shm: ranks may do it at different times.
    options = {id(m): state.options for state, (_, m) in zip(states, pairs, strict=True)}
    policy = CustomPolicy(lambda module: id(module) in options)
    specs = plan_units(copied, policy, (), others, with_empty=True)
    for spec in specs:
        spec.options = options[id(spec.module)]
    plan = ShardingPlan(type(model).__bases__[0], copied, specs)
    plan.comms, plan.group_given, plan.is_alone = root.comms, root.group_given, root.is_alone
    engine = make_engine(copied, root.comms, plan.options)
    plan.plan_step(engine, [plan.make_unit(engine, spec) for spec in specs])
    if root.sync_buffers:
        sync_buffers(copied, root.sync_buffers)
    if root.comms.all.world > 1:
        ids = {id(param) for param in others}
        has_others = [m for m in plan.names if any(id(p) in ids for p in m._parameters.values())]
        watch(copied, has_others)
    if root.model.spare is not None:
        plan.context.spare = root.model.spare.like(copied)
    for each in EXTENSIONS:
        each.finish(copied, of=model)
    introduce(copied)
    for state, (_, module) in zip(states, pairs, strict=True):
        state_of(module).form = state.form
    with writing([state_of(copied).unit]):
        for unit, module in pairs:
            _copy_unit(unit, state_of(module).unit)
    return copied


def copy_plain(root: nn.Module, memo: dict[int, Any]) -> Copied:
    """Copy the modules of a sharded model. Its parameters get their full shape and no values."""
    states = list(units_of(root))
    units, in_units = [(module, state.unit) for module, state in states], set()
    for _, unit in units:
        # As they were when the unit was made, so the copy's unit has the same layout.
        for index, (param, trainable) in enumerate(
            zip(unit.params, unit.was_trainable, strict=True)
        ):
            in_units.add(id(param))
            full = without_memory(param, unit.param(index)["shape"], param.device)
            memo[id(param)] = full.requires_grad_(trainable)
    token = _within.set(True)
    try:
        copied = _copy_module(root, memo)
    finally:
        _within.reset(token)
    for reference, number in (hook for _, state in states for hook in state.hooks):
        for name in _HOOK_TABLES:
            getattr(memo.get(id(reference())), name, {}).pop(number, None)
    for unit in (unit for _, unit in units):
        for param in unit.params:  # their attributes may refer to modules: copy last
            if type(memo[id(param)]) is not nn.Parameter:
                vars(memo[id(param)]).update(copy.deepcopy(vars(param), memo))
    pairs = [(unit, memo[id(module)]) for module, unit in units]
    others = [memo[id(p)] for p in root.parameters() if id(p) not in in_units]
    return copied, pairs, others


def _copy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy one unit's module, as its original class and without zshard's attributes."""
    original = class_of(module)
    copied = memo[id(module)] = original.__new__(original)
    attributes = {
        key: value
        for key, value in vars(module).items()
        if key != ATTRIBUTE and type(value).__module__ != "zshard.state.module"
    }
    copied.__dict__.update(copy.deepcopy(attributes, memo))
    return copied


def _copy_unit(source: _core.Unit, target: _core.Unit) -> None:
    """Copy this rank's shard of a unit, and its settings. Raises RuntimeError if shards differ."""

    def parts(unit: _core.Unit) -> list[tuple[Any, ...]]:
        facts = [unit.param(index) for index in range(unit.n_params)]
        return [(fact["shape"], fact["begin"], fact["numel"]) for fact in facts]

    if parts(source) != parts(target):
        raise RuntimeError(
            f"cannot copy unit '{source.name or '(root)'}', as its copy has other parameters: do "
            "not change modules or tied parameters after FSDP(...)"
        )
    for name in ("strategy", "divisor", "sync"):
        if getattr(target, name) != getattr(source, name):
            setattr(target, name, getattr(source, name))
    with torch.no_grad(), plain():
        for param, copied in zip(source.params, target.params, strict=True):
            copied.copy_(param).requires_grad_(param.requires_grad)
