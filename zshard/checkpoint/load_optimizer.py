"""Load the state of an optimizer from a checkpoint: checked first, then through the optimizer's own
load_state_dict(), and read into place at the end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from zshard import _core
from zshard.checkpoint.checkpoint import Checkpoint, OptimizerState, read_whole
from zshard.guard import slices
from zshard.optim.sharded_state import class_of_state, params_of
from zshard.ranks.agreement import on_all_ranks
from zshard.state.optimizer import OptimizerPlan, taken
from zshard.state.optimizer_names import by_number, names_of
from zshard.state.source import Source
from zshard.state.stand_ins import Pending
from zshard.units.units import plain_name

_HOOKS = "_optimizer_load_state_dict_post_hooks"


class OptimizerLoad:
    """Loads an optimizer, in steps.

    optimizer.load_state_dict() receives memory instead of values: new memory for this rank's
    shards, or the optimizer's existing state. So torch and its hooks work as always, and if they
    fail on any rank, the optimizer gets its previous state back. Values are read afterwards, into
    the state as it is then.

    Creating it changes nothing. It raises RuntimeError, which lists what does not fit, and
    ValueError for parameters that are not the model's.
    """

    @slices.plain()
    def __init__(
        self, model: nn.Module, optimizer: Optimizer, contents: Checkpoint, strict: bool = True
    ) -> None:
        """strict: require an optimizer of the class that the checkpoint names."""
        told = contents.optimizer
        if told is None:
            why = contents.no_optimizer or "omit the optimizer to load the model alone"
            raise RuntimeError(f"'{contents.path}' has no usable optimizer state: {why}")
        names = names_of(model, optimizer)
        problems, kind = [], class_of_state(optimizer).__name__  # torch's or zshard's
        if strict and told.kind is not None and told.kind.rpartition(".")[2] != kind:
            problems.append(
                f"the checkpoint has the state of {told.kind}, but the optimizer is {kind}; pass "
                "strict=False to load it anyway"
            )
        told, more = told.fitted(optimizer, names)
        problems += more
        more, self._numbered = by_number(model, optimizer, _pending_state(model, contents, told))
        if problems + more:
            head = f"Error(s) in loading optimizer state for {type(optimizer).__name__}:"
            raise RuntimeError("\n\t".join([head, *problems, *more]))
        self._optimizer = optimizer
        params = dict(enumerate(params_of(optimizer)))
        self._plan = OptimizerPlan(optimizer, params, self._numbered["state"])
        self._hooks: Mapping[int, Callable[[Optimizer], object]] = {}

    def pending(self) -> list[Pending]:
        """Return the tensors that this rank will read."""
        return self._plan.pending()

    def install(self, comm: _core.Comm, reader: Source) -> None:
        """Make the optimizer load everything except its shards, for which it gets memory.
        Collective: if its load_state_dict() raises on any rank, this raises on all ranks and leaves
        the optimizer unchanged."""
        optimizer = self._optimizer
        with on_all_ranks(comm):
            state = taken(optimizer, self._plan.take(reader, optimizer.state))
            state = {**self._numbered["state"], **state}
        before = optimizer.state, optimizer.param_groups
        self._hooks = getattr(optimizer, _HOOKS, self._hooks)
        try:
            with on_all_ranks(comm):
                setattr(optimizer, _HOOKS, OrderedDict())
                try:
                    optimizer.load_state_dict({**self._numbered, "state": state})
                finally:
                    setattr(optimizer, _HOOKS, self._hooks)
                self._plan.adopt(optimizer)
        except BaseException:
            optimizer.state, optimizer.param_groups = before
            raise

    def read(self, reader: Source) -> None:
        """Read the shards into the state that install() created, then run the post hooks."""
        self._plan.read(reader)
        for hook in self._hooks.values():
            hook(self._optimizer)


def _pending_state(model: nn.Module, contents: Checkpoint, told: OptimizerState) -> dict[str, Any]:
    """Return the state dict by name, with tensors that have no values yet."""
    state: dict[str, dict[str, Any]] = {
        name: {
            key: Pending.of(f"{name}.{key}", entry)
            for key, entry in told.tensors.get(name, {}).items()
        }
        for name in dict.fromkeys([*told.tensors, *told.values])
    }
    _keep_dtypes(model, contents, state)
    for name, own in told.values.items():
        state[name].update(own)
    other = tree_map(_read, told.other)
    return {"state": {**other, **state}, "param_groups": told.groups}


def _read(value: Any) -> Any:
    if not hasattr(value, "read_into"):
        return value
    value.check()
    return read_whole(value)


def _keep_dtypes(
    model: nn.Module, contents: Checkpoint, state: Mapping[str, Mapping[str, Pending]]
) -> None:
    """Mark state that was saved in a floating-point dtype other than its parameter's, where the
    parameter has the same dtype here: the optimizer keeps that dtype, while torch would cast."""
    saved = {plain_name(name): entry for name, entry in contents.model.items()}
    for full, param in model.named_parameters(remove_duplicate=False):
        name = plain_name(full)
        entry = saved.get(name, saved.get(contents.tied.get(name, "")))
        if entry is None or entry.dtype != param.dtype or not param.is_floating_point():
            continue
        for key, value in state.get(name, {}).items():
            is_float = value.dtype.is_floating_point and value.dtype != param.dtype
            value.keeps_dtype = is_float and tuple(value.shape) == entry.shape and key != "step"
