"""Load the state of an optimizer from a checkpoint; each rank reads its own shards.

The one idea: optimizer.load_state_dict() receives memory instead of values: new memory for this
rank's shards, or the state that the optimizer already has. So torch and its hooks work as always,
and if they fail on any rank, the optimizer gets its previous state back. Values are read
afterwards, into the state as it is then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zshard._checkpoint.checkpoint import Checkpoint, OptimizerState, Readable
from zshard._checkpoint.reader import Reader
from zshard._state_dict.optimizer import LoadingSpace, Taken, settle
from zshard._state_dict.optimizer_names import by_number, names_of
from zshard._state_dict.stand_ins import Pending
from zshard._units.names import plain
from zshard._units.shards import part_of

_HOOKS = "_optimizer_load_state_dict_post_hooks"


class _StatePiece(NamedTuple):
    """A shard that this rank reads into the optimizer's state."""

    param: Tensor
    key: str
    entry: Readable


class OptimizerPlan:
    """The plan of loading an optimizer. Creating it changes nothing. It raises RuntimeError, which
    lists what does not fit, and ValueError for parameters that are not the model's."""

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
        self._kept = _kept_dtypes(model, contents, told)
        more, self._numbered = by_number(model, optimizer, _outline(told, self._kept))
        if problems + more:
            head = f"Error(s) in loading optimizer state for {type(optimizer).__name__}:"
            raise RuntimeError("\n\t".join([head, *problems, *more]))
        settle(optimizer)
        self._optimizer = optimizer
        self._params = [param for group in optimizer.param_groups for param in group["params"]]
        self._has_parts = any(part_of(param) is not None for param in self._params)
        self._entries = {
            _label(name, key): e for name, own in told.tensors.items() for key, e in own.items()
        }
        self._pieces: list[_StatePiece] = []
        self._as_saved: list[tuple[Tensor, str, Tensor]] = []  # state with a dtype of its own
        self._before: tuple[Any, Any] | None = None
        self._hooks: Any = OrderedDict()

    @property
    def entries(self) -> Iterator[Readable]:
        """All tensors that will be read."""
        return iter(self._entries.values())

    def ranges(self) -> Iterator[tuple[Readable, int, int]]:
        """(tensor, first element, number of elements) of what this rank reads, except for a few
        elements."""
        for number, entries in self._numbered["state"].items():
            part = part_of(self._params[number])
            for value in entries.values():
                if not isinstance(value, Pending):
                    continue
                entry = self._entries[value.label]
                if part is not None and part.is_cut and value.dim() > 0:
                    yield entry, part.begin, part.numel
                else:
                    yield entry, 0, value.numel()

    def prepare(self, reader: Reader) -> None:
        """Allocate memory for this rank's shards, and read what is not sharded. Change nothing."""
        state = self._numbered["state"]
        found = [(self._params[number], entries) for number, entries in state.items()]
        room = LoadingSpace(found)
        rows = [
            (param, entries, key, value.label, room.is_cut(param, key, value))
            for param, entries in found
            for key, value in entries.items()
            if isinstance(value, Pending)
        ]
        # Existing state may be overwritten if it has the right kind for all parameters: otherwise
        # their state would not be contiguous.
        fresh = {
            key
            for param, _, key, label, is_cut in rows
            if is_cut and not _is_place(self._live(param, key), param) and label not in self._kept
        }
        for param, entries, key, label, is_cut in rows:
            entry = self._entries[label]
            if label in self._kept:
                tensor = _part(param, entry, reader) if is_cut else reader.whole(entry)
                self._as_saved.append((param, key, tensor.to(param.device)))
            elif not is_cut:
                tensor = reader.whole(entry)
            elif key == "step":  # with a dtype of its own
                tensor = _part(param, entry, reader)
            else:
                self._pieces.append(_StatePiece(param, key, entry))
                tensor = room.place(param, key) if key in fresh else self._live(param, key)
            entries[key] = Taken(tensor) if self._has_parts else tensor

    def _live(self, param: Tensor, key: str) -> Any:
        """The optimizer's current state."""
        return self._optimizer.state.get(param, {}).get(key)

    def install(self) -> None:
        """Make the optimizer load everything but the values that are not yet read. May raise
        whatever the optimizer's load_state_dict() raises; then call undo()."""
        optimizer = self._optimizer
        self._before = optimizer.state, optimizer.param_groups
        self._hooks = getattr(optimizer, _HOOKS, OrderedDict())
        setattr(optimizer, _HOOKS, OrderedDict())
        try:
            optimizer.load_state_dict(self._numbered)
        finally:
            setattr(optimizer, _HOOKS, self._hooks)
        for param, key, tensor in self._as_saved:
            if key in optimizer.state[param]:  # torch has made it of the parameter's dtype
                optimizer.state[param][key] = tensor
        for param, key, _ in self._pieces:
            if not _is_place(optimizer.state[param].get(key), param):
                raise RuntimeError(
                    f"zshard.load() cannot read '{key}' in place: load_state_dict() of "
                    f"{type(optimizer).__name__} or one of its hooks replaced it"
                )

    def undo(self) -> None:
        """Restore the optimizer's state from before install()."""
        if self._before is not None:
            self._optimizer.state, self._optimizer.param_groups = self._before

    def read(self, reader: Reader) -> None:
        """Read the values into the state that install() created, then run the post hooks."""
        for param, key, entry in self._pieces:
            part = part_of(param)
            begin = part.begin if part is not None and part.is_cut else 0
            reader.read(entry, begin, self._optimizer.state[param][key])
        for hook in self._hooks.values():
            hook(self._optimizer)


def _part(param: Tensor, entry: Readable, reader: Reader) -> Tensor:
    """Read this rank's shard of a tensor that is sharded like `param`, in its own dtype."""
    part = part_of(param)
    assert part is not None, "only sharded parameters get here"
    made = torch.empty(part.local_shape, dtype=entry.dtype)
    reader.read(entry, part.begin if part.is_cut else 0, made)
    return made


def _other_class(told: OptimizerState, optimizer: Optimizer) -> list[str]:
    name = type(optimizer).__name__
    if told.kind is None or told.kind.rpartition(".")[2] == name:  # torch's is as good as zshard's
        return []
    return [
        f"the checkpoint has the state of {told.kind}, but the optimizer is {name}; pass "
        "strict=False to load it anyway"
    ]


def _groups_of(
    options: Mapping[str, Mapping[str, Any]], optimizer: Optimizer, names: Mapping[int, str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the optimizer's own param groups with the `options` of their parameters, and a list
    of parameters whose options differ within a group."""
    groups, problems = [], []
    options = {plain(name): own for name, own in options.items()}
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


def _kept_dtypes(
    model: nn.Module, contents: Checkpoint, told: OptimizerState
) -> dict[str, torch.dtype]:
    """{label: dtype of the parameter} of state that was saved in another floating-point dtype than
    its parameter, where the parameter has the same dtype here. The optimizer keeps such state in
    its own dtype, while torch would cast it; checks see the dtype of the parameter."""
    saved = {plain(name): entry for name, entry in contents.model.items()}
    found = {}
    for full, param in model.named_parameters(remove_duplicate=False):
        name = plain(full)
        entry = saved.get(name, saved.get(contents.tied.get(name, "")))
        if entry is None or entry.dtype != param.dtype or not param.is_floating_point():
            continue
        for key, state in told.tensors.get(name, {}).items():
            is_float = state.dtype.is_floating_point and state.dtype != param.dtype
            if is_float and state.shape == entry.shape and key != "step":
                found[_label(name, key)] = param.dtype
    return found


def _outline(told: OptimizerState, kept: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """The state dict by names, with tensors that have no values yet."""
    names = dict.fromkeys([*told.tensors, *told.values])
    state = {
        name: {
            **{
                key: Pending.of(label, entry.shape, kept.get(label, entry.dtype))
                for key, entry in told.tensors.get(name, {}).items()
                for label in [_label(name, key)]
            },
            **told.values.get(name, {}),
        }
        for name in names
    }
    return {"state": state, "param_groups": told.groups}


def _label(name: str, key: str) -> str:
    return f"{name}.{key}"


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
