"""Load the state of an optimizer from a checkpoint: checked first, then through the optimizer's own
load_state_dict(), and read into place at the end.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from zshard import _core
from zshard.checkpoint.checkpoint import Checkpoint, OptimizerState
from zshard.guard import slices
from zshard.optim.sharded_state import class_of_state
from zshard.ranks.agreement import on_all_ranks
from zshard.state.optimizer import install
from zshard.state.optimizer_load import entries_to_load, undo_of
from zshard.state.optimizer_names import by_number, names_of
from zshard.state.source import LoadPlan, filled, planned_state
from zshard.state.stand_ins import Pending
from zshard.units.returned import tensors_in
from zshard.units.units import plain_name


@slices.plain()
def numbered_state(
    model: nn.Module, optimizer: Optimizer, found: Checkpoint, strict: bool = True
) -> dict[str, Any]:
    """Return the argument of optimizer.load_state_dict(), with tensors that have no values yet.

    strict: require an optimizer of the class that the checkpoint names.

    Raises RuntimeError, which lists what does not fit, and ValueError for parameters that are not
    the model's.
    """
    saved = found.optimizer
    if saved is None:
        why = found.no_optimizer or "omit the optimizer to load the model alone"
        raise RuntimeError(f"'{found.path}' has no usable optimizer state: {why}")
    names = names_of(model, optimizer)
    problems, kind = [], class_of_state(optimizer).__name__  # torch's or zshard's
    if strict and saved.kind is not None and saved.kind.rpartition(".")[2] != kind:
        problems.append(
            f"the checkpoint has the state of {saved.kind}, but the optimizer is {kind}; pass "
            "strict=False to load it anyway"
        )
    saved, misfits = saved.fitted(optimizer, names)
    unfit, numbered = by_number(model, optimizer, _pending_state(model, found, saved))
    problems += [*misfits, *unfit]
    if problems:
        head = f"Error(s) in loading optimizer state for {type(optimizer).__name__}:"
        raise RuntimeError("\n\t".join([head, *problems]))
    return numbered


def pending_in(optimizer: Optimizer, numbered: dict[str, Any]) -> list[Pending]:
    """Return the tensors that this rank will read."""
    shards = (entry.own for entry in entries_to_load(optimizer, numbered))
    return [own for own in shards if isinstance(own, Pending)]


def prepare(comm: _core.Comm, optimizer: Optimizer, numbered: dict[str, Any]) -> LoadPlan:
    """Make the optimizer load everything except its shards, for which it makes memory or takes that
    of its state; return the copies to it, and the post hooks.

    Collective: if its load_state_dict() raises on any rank, this raises on all ranks and leaves the
    optimizer unchanged.
    """
    todo = LoadPlan(undo=[(optimizer, undo_of(optimizer))])
    install()  # a plain model's optimizer may be torch's
    token = planned_state.set(todo)
    try:
        with on_all_ranks(comm):
            optimizer.load_state_dict(numbered)
            _check_places(optimizer, todo)
    except BaseException:
        for _, undo in reversed(todo.undo):
            undo()
        raise
    finally:
        planned_state.reset(token)
    return todo


def _check_places(optimizer: Optimizer, todo: LoadPlan) -> None:
    """Raise RuntimeError if what will be read would not get into the optimizer's state."""
    state = [value for each, _ in todo.undo for value in tensors_in(each.state)]
    places = {id(value) for value in state}
    lost = [copy.value for copy in todo.copies if id(copy.target) not in places]
    lost += [value for value in state if isinstance(value, Pending)]
    if lost:
        raise RuntimeError(
            f"zshard.load() cannot read '{getattr(lost[0], 'label', '')}' in place: "
            f"load_state_dict() of {type(optimizer).__name__} or one of its hooks replaced it; "
            "replace state in a hook after it, register_load_state_dict_post_hook()"
        )


def _pending_state(model: nn.Module, found: Checkpoint, saved: OptimizerState) -> dict[str, Any]:
    """Return the state dict by name, with tensors that have no values yet. They keep their dtypes
    where their parameter was saved in the dtype that it has here."""
    tensors = {**found.model, **{alias: found.model[name] for alias, name in found.tied.items()}}
    dtypes = {plain_name(name): entry.dtype for name, entry in tensors.items()}
    here = model.named_parameters(remove_duplicate=False)
    same = {name for full, p in here if dtypes.get(name := plain_name(full)) == p.dtype}
    state: dict[str, dict[str, Any]] = {name: {} for name in [*saved.tensors, *saved.values]}
    for name, entries in saved.tensors.items():
        for key, entry in entries.items():
            state[name][key] = value = found.pending(f"{name}.{key}", entry)
            value.keeps_dtype = plain_name(name) in same
    for name, values in saved.values.items():
        state[name].update(values)

    def read(value: Any) -> Any:
        if not hasattr(value, "read_into"):
            return value
        value.check()
        return filled(found.pending("", value))

    return {"state": {**tree_map(read, saved.other), **state}, "param_groups": saved.groups}
