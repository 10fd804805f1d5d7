"""Load the state of an optimizer from a checkpoint; each rank reads its own shards.

optimizer.load_state_dict() receives memory instead of values: new memory for this
rank's shards, or the state that the optimizer already has. So torch and its hooks work as always,
and if they fail on any rank, the optimizer gets its previous state back. Values are read
afterwards, into the state as it is then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from zshard import _core
from zshard.checkpoint.checkpoint import Checkpoint, OptimizerState
from zshard.checkpoint.reader import Reader
from zshard.guard import slices
from zshard.optim.sharded_state import params_of
from zshard.ranks.agreement import on_all_ranks
from zshard.state.optimizer import OptimizerPlan, taken
from zshard.state.optimizer_names import by_number, names_of
from zshard.state.stand_ins import Pending
from zshard.units.names import plain_name

_HOOKS = "_optimizer_load_state_dict_post_hooks"


class OptimizerLoad:
    """Loads an optimizer, in steps. Creating it changes nothing. It raises RuntimeError, which
    lists what does not fit, and ValueError for parameters that are not the model's."""

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
        problems = _other_class(told, optimizer) if strict else []
        if told.options is not None:
            groups, more = _groups_of(told.options, optimizer, names)
            told = replace(told, groups=groups)
            problems += more
        told, more = _by_place(told, optimizer, names)
        problems += more
        more, self._numbered = by_number(model, optimizer, _pending_state(model, contents, told))
        if problems + more:
            head = f"Error(s) in loading optimizer state for {type(optimizer).__name__}:"
            raise RuntimeError("\n\t".join([head, *problems, *more]))
        self._optimizer = optimizer
        self._plan = OptimizerPlan(dict(enumerate(params_of(optimizer))), self._numbered["state"])
        self._hooks: Any = OrderedDict()

    def pending(self) -> list[Pending]:
        """What this rank will read."""
        return self._plan.pending()

    def install(self, comm: _core.Comm, reader: Reader) -> None:
        """Make the optimizer load all but its shards, for which it gets memory. Collective: raises
        on all ranks, with the optimizer as it was, what its load_state_dict() raises on any."""
        optimizer = self._optimizer
        with on_all_ranks(comm):
            state = taken(optimizer, self._plan.take(reader, optimizer.state))
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

    def read(self, reader: Reader) -> None:
        """Read the shards into the state that install() created, then run the post hooks."""
        self._plan.read(reader)
        for hook in self._hooks.values():
            hook(self._optimizer)


def _other_class(told: OptimizerState, optimizer: Optimizer) -> list[str]:
    name = type(optimizer).__name__
    if told.kind is None or told.kind.rpartition(".")[2] == name:  # torch's is as good as zshard's
        return []
    return [
        f"the checkpoint has the state of {told.kind}, but the optimizer is {name}; pass "
        "strict=False to load it anyway"
    ]


def _by_place(
    told: OptimizerState, optimizer: Optimizer, names: Mapping[int, str]
) -> tuple[OptimizerState, list[str]]:
    """Return the state by names where it has numbers: as in torch, the parameter is the one that
    has the same place in the param groups. And a list of what does not fit."""
    listed = [number for group in told.groups for number in group["params"]]
    if not listed or not all(type(number) is int for number in listed):
        return told, []
    theirs = [len(group["params"]) for group in told.groups]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    known = {n: names[id(p)] for n, p in zip(listed, params_of(optimizer), strict=False)}
    if theirs != ours or not known.keys() >= told.tensors.keys() | told.values.keys():
        nothing = replace(told, groups=[{"params": []} for _ in ours], tensors={}, values={})
        return nothing, [
            f"it has param groups of {theirs} parameters, known by number, but the optimizer's "
            f"have {ours}"
        ]
    groups = [{**group, "params": [known[n] for n in group["params"]]} for group in told.groups]
    tensors = {known[n]: own for n, own in told.tensors.items()}
    values = {known[n]: own for n, own in told.values.items()}
    return replace(told, groups=groups, tensors=tensors, values=values), []


def _groups_of(
    options: Mapping[str, Mapping[str, Any]], optimizer: Optimizer, names: Mapping[int, str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the optimizer's own param groups with the `options` of their parameters, and a list
    of parameters whose options differ within a group."""
    groups, problems = [], []
    options = {plain_name(name): own for name, own in options.items()}
    for i, group in enumerate(optimizer.param_groups):
        own = [names[id(p)] for p in group["params"] if names[id(p)] in options]
        first = options[own[0]] if own else {}
        for name in own:
            if options[name] != first:
                problems.append(
                    f"'{name}' and '{own[0]}' are both in param group {i}, but the checkpoint has "
                    "different options for them"
                )
        groups.append({**first, "params": own})
    return groups, problems


def _pending_state(model: nn.Module, contents: Checkpoint, told: OptimizerState) -> dict[str, Any]:
    """The state dict by names, with tensors that have no values yet."""
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
    return {"state": state, "param_groups": told.groups}


def _keep_dtypes(
    model: nn.Module, contents: Checkpoint, state: Mapping[str, Mapping[str, Pending]]
) -> None:
    """Mark state that was saved in another floating-point dtype than its parameter, where the
    parameter has the same dtype here: the optimizer keeps it, while torch would cast it."""
    saved = {plain_name(name): entry for name, entry in contents.model.items()}
    for full, param in model.named_parameters(remove_duplicate=False):
        name = plain_name(full)
        entry = saved.get(name, saved.get(contents.tied.get(name, "")))
        if entry is None or entry.dtype != param.dtype or not param.is_floating_point():
            continue
        for key, value in state.get(name, {}).items():
            is_float = value.dtype.is_floating_point and value.dtype != param.dtype
            value.keeps_dtype = is_float and tuple(value.shape) == entry.shape and key != "step"
