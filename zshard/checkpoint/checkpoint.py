"""The content of a checkpoint, whatever its format: tensors by name, and where to read each one.

Code that loads does not see the format. zshard checkpoints, safetensors files, Hugging Face folders
and torch.distributed.checkpoint folders all become a Checkpoint. Formats describe the state of an
optimizer in several ways, which all become an OptimizerState.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from torch.optim import Optimizer

from zshard import _core
from zshard._errors import CheckpointError
from zshard.checkpoint import script_state
from zshard.checkpoint.manifest import Block, Manifest, dict_of
from zshard.checkpoint.safetensors import OpenFile
from zshard.optim.sharded_state import params_of, without_parameters
from zshard.ranks.agreement import bytes_of
from zshard.units.units import plain_name

KeyPath = tuple[Any, ...]  # keys of nested dicts and lists
_File = TypeVar("_File", bound=OpenFile)


class NoDataError(CheckpointError):
    """A value is not plain data; everything else is valid."""


class Readable(Protocol):
    """A tensor that can be read."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def files(self) -> list[str]:
        """Return the names of the files that contain the tensor."""

    def check(self) -> None:
        """Check what opening has not checked and what does not need values. Raise CheckpointError
        if something is wrong."""

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the tensor's bytes, in row-major order, starting at byte `offset`."""


def read_whole(entry: Readable) -> torch.Tensor:
    """Read a full tensor into new memory on the CPU."""
    made = torch.empty(entry.shape, dtype=entry.dtype)
    if made.numel() > 0:
        entry.read_into(bytes_of(made), 0)
    return made


class InParts(Protocol):
    """The files of a checkpoint that no folder has as they are: an extra's."""

    path: str
    manifest: Manifest

    def open(self, name: str, kind: type[_File]) -> _File:
        """Open a file of the checkpoint as a `kind` of OpenFile."""

    def own_blocks(self, comm: _core.Comm, wanted: Iterable[tuple[str, int, int]]) -> list[Block]:
        """Return the blocks on disk that this rank verifies. Collective. wanted: (file, first byte,
        byte after the last) of what this rank will read."""

    def close(self) -> None: ...


@dataclass
class Checkpoint:
    """An open checkpoint; close() closes its files."""

    path: str
    step: int | None = None
    model: Mapping[str, Readable] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)  # alias: name in `model`
    others: Mapping[str, Any] = field(default_factory=dict)  # state dict entries without tensors
    versions: Mapping[str, int] | None = None  # versions other than 1 of modules, by prefix
    optimizer: OptimizerState | None = None
    no_optimizer: str = ""  # why there is none, if that needs an explanation
    manifest: Manifest | None = None
    files: dict[str, OpenFile] = field(default_factory=dict)  # open files by name
    spread: InParts | None = None  # where the files are, if they are in parts
    shared: Mapping[str, Callable[[], Any]] = field(default_factory=dict)  # every rank's extra

    def extra_of(self, rank: int, strict: bool = True) -> dict[str, Any]:
        """Return the `extra` that `rank` saved. Raise CheckpointError if it is not a dict or, with
        `strict`, if an entry is not plain data; otherwise warn and skip that entry."""
        if self.manifest is None:
            return self._shared(strict)
        found = decode(self.manifest.extra_of(rank), self.path)
        if not isinstance(found, dict):
            raise CheckpointError(
                f"'{self.path}': extra must be a dict, got {type(found).__name__}"
            )
        return found

    def _shared(self, strict: bool) -> dict[str, Any]:
        found = {}
        for name, read in self.shared.items():
            try:
                found[name] = read()
            except NoDataError as error:
                if strict:
                    raise NoDataError(f"{error}; pass strict=False to skip it") from None
                warnings.warn(f"{error}; skipped", stacklevel=2)
        return found

    def close(self) -> None:
        """Close all files. Further calls do nothing."""
        for file in self.files.values():
            file.close()
        if self.spread is not None:
            self.spread.close()


def decode(value: object, path: str) -> Any:
    """Call script_state.decode(); CheckpointError, which names the file, for invalid values."""
    try:
        return script_state.decode(value)
    except ValueError as error:
        raise CheckpointError(f"'{path}' is not a valid manifest: {error}") from None


def is_extra_state(name: str) -> bool:
    """Return whether it names the result of a module's get_extra_state(). set_extra_state() needs
    values, so a tensor of that name, unlike others, is read at once."""
    return name.rpartition(".")[2] == "_extra_state"


# --- the state of an optimizer --------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer, keyed by parameter name, or by number if the file has no names."""

    kind: str | None  # the qualified name of its class
    groups: list[dict[str, Any]]  # options, and parameter names under "params"
    tensors: dict[str, dict[str, Readable]]  # {parameter: {"exp_avg": ..., ...}}
    values: dict[str, dict[str, Any]]  # state that is not a tensor
    options: dict[str, dict[str, Any]] | None = None  # instead of groups: options per parameter
    # Under keys that are no parameters; may have Readables.
    other: dict[Any, Any] = field(default_factory=dict)

    def fitted(
        self, optimizer: Optimizer, names: Mapping[int, str]
    ) -> tuple[OptimizerState, list[str]]:
        """Return the state by name and in param groups, and a list of mismatches.

        names: names of the optimizer's parameters, by id.
        """
        told = self
        problems: list[str] = []
        if self.options is not None:
            groups, problems = _groups_of(self.options, optimizer, names)
            told = replace(told, groups=groups)
        told, more = told._by_place(optimizer, names)
        return told, problems + more

    def _by_place(
        self, optimizer: Optimizer, names: Mapping[int, str]
    ) -> tuple[OptimizerState, list[str]]:
        """Return the state by name where the file has numbers, and a list of mismatches. As in
        torch, the parameter is the one at the same place in the param groups."""
        listed = [number for group in self.groups for number in group["params"]]
        if not listed or not all(type(number) is int for number in listed):
            return self, []
        theirs = [len(group["params"]) for group in self.groups]
        ours = [len(group["params"]) for group in optimizer.param_groups]
        known = {n: names[id(p)] for n, p in zip(listed, params_of(optimizer), strict=False)}
        if theirs != ours or not known.keys() >= self.tensors.keys() | self.values.keys():
            nothing = replace(self, groups=[{"params": []} for _ in ours], tensors={}, values={})
            return nothing, [
                f"it has param groups of {theirs} parameters, known by number, but the optimizer's "
                f"have {ours}"
            ]
        groups = [{**group, "params": [known[n] for n in group["params"]]} for group in self.groups]
        tensors = {known[n]: own for n, own in self.tensors.items()}
        values = {known[n]: own for n, own in self.values.items()}
        return replace(self, groups=groups, tensors=tensors, values=values), []


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


def optimizer_of_manifest(
    told: Mapping[str, Any], tensors: Mapping[str, Readable], where: str
) -> OptimizerState:
    """Return the optimizer's state as a manifest describes it; see contents.py. Raise
    CheckpointError if the description is invalid or does not fit the tensors."""
    left = dict(tensors)
    state: dict[str, dict[str, Readable]] = {}
    values: dict[str, dict[str, Any]] = {}
    try:
        groups = [
            {**dict_of(decode(group["options"], where)), "params": _names(group["params"])}
            for group in told["groups"]
        ]
        for name, own in told["state"].items():
            state[name] = {key: left.pop(f"{name}.{key}") for key in _names(own["tensors"])}
            values[name] = dict_of(decode(own["values"], where))
        kind, other = _name(told["class"]), dict_of(decode(told.get("other", {}), where))
    except KeyError as error:
        raise CheckpointError(
            f"'{where}' and the optimizer's files do not match: one of them lacks {error}"
        ) from None
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"'{where}' has an invalid optimizer entry: {error}") from None
    if left:
        raise CheckpointError(f"'{where}' does not list the optimizer's tensor '{min(left)}'")
    return OptimizerState(kind, groups, state, values, other=other)


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a name, got {value!r:.40}")
    return value


def _names(value: object) -> list[str]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {value!r:.40}")
    return [_name(each) for each in value]


def optimizer_of_paths(
    tensors: Mapping[KeyPath, Readable], values: Mapping[KeyPath, Any], params: Sequence[str]
) -> OptimizerState:
    """Accept the formats of torch.distributed.checkpoint.state_dict: ("state", name, key) and
    ("param_groups", i, option), or flat, ("state.name.key",) and ("param_groups.name.option",).
    Also accept that of optimizer.state_dict(), with numbers, for which the groups may give the
    names. Otherwise raise KeyError or TypeError."""
    if all(len(path) == 1 for path in (*tensors, *values)):
        return _flat_optimizer(tensors, values, set(params))
    groups: dict[int, dict[str, Any]] = {}
    for path, value in (*values.items(), *tensors.items()):
        if path[:1] == ("param_groups",) and len(path) >= 3:
            _put(groups.setdefault(path[1], {}), path[2:], _option(value, tensors.get(path)))
    listed = [groups[i] for i in sorted(groups, key=lambda i: (len(str(i)), str(i)))]
    for group in listed:
        group.update({k: [v[i] for i in range(len(v))] for k, v in group.items() if _is_list(v)})
    names = _names_by_number(listed)
    known = {str(param) for group in listed for param in group.get("params", ())}
    state: dict[str, dict[str, Readable]] = {}
    others: dict[str, dict[str, Any]] = {}
    rest: dict[Any, Any] = {}
    for kind, into in ((tensors, state), (values, others)):
        for path, value in kind.items():
            is_str = path[0] == "state" and len(path) > 1 and isinstance(path[1], str)
            if is_str and path[1] not in known:
                _put(rest, path[1:], value)
            elif path[:1] == ("state",):
                if len(path) != 3 or not isinstance(path[2], str):
                    raise KeyError(path)
                into.setdefault(_named(path[1], names), {})[path[2]] = value
    own = [{**state.get(n, {}), **others.get(n, {})} for n in {**state, **others}]
    if without_parameters(rest, own).keys() != rest.keys():
        raise KeyError("state")
    for group in listed:
        group["params"] = [_named(each, names) for each in group["params"]]
        group.pop("param_names", None)
    if not listed:
        raise KeyError("param_groups")
    return OptimizerState(None, listed, state, others, other=rest)


def _flat_optimizer(
    tensors: Mapping[KeyPath, Readable], values: Mapping[KeyPath, Any], params: set[str]
) -> OptimizerState:
    """Return the state of the flat format, in which each parameter has its own options."""
    state: dict[str, dict[str, Readable]] = {}
    others: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for kind, prefix, into in (
        (tensors, "state.", state),
        (values, "state.", others),
        (values, "param_groups.", options),
        (tensors, "param_groups.", options),
    ):
        for (key,), value in kind.items():
            if key.startswith(prefix):
                name, what = _split(key[len(prefix) :], params)
                own = _option(value, tensors.get((key,))) if into is options else value
                into.setdefault(name, {})[what] = own
    if not options:
        raise KeyError("param_groups")
    return OptimizerState(None, [], state, others, options)


def _split(text: str, params: set[str]) -> tuple[str, str]:
    """Split "<parameter>.<rest>" into both. Raise KeyError if it begins with no parameter name."""
    ends = [i for i, letter in enumerate(text) if letter == "." and text[:i] in params]
    if not ends:
        raise KeyError(text)
    return text[: ends[-1]], text[ends[-1] + 1 :]


def _put(into: dict[Any, Any], path: KeyPath, value: object) -> None:
    for key in path[:-1]:
        into = into.setdefault(key, {})
        if not isinstance(into, dict):
            return
    into[path[-1]] = value


def _option(value: Any, tensor: Readable | None) -> Any:
    """Return the value of an option, which is read if it is a tensor, such as a learning rate."""
    return value if tensor is None else read_whole(tensor)


def _is_list(value: object) -> bool:
    """Return whether it was a list. (Torch flattens lists that contain tensors, and several ranks
    may have written their elements, in any order.)"""
    return isinstance(value, dict) and value.keys() == set(range(len(value))) and bool(value)


def _named(key: object, names: Mapping[str, str]) -> Any:
    """Return a parameter's name, or its number as text if the file has no names."""
    return int(str(key)) if not names and str(key).isdecimal() else names[str(key)]


def _names_by_number(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return {key of a parameter in the state, as text: name of the parameter}."""
    names: dict[str, str] = {}
    for group in groups:
        params = group.get("params", [])
        own = group.get("param_names", params)
        if isinstance(params, list) and isinstance(own, list) and len(params) == len(own):
            pairs = zip(params, own, strict=True)
            names.update((str(param), name) for param, name in pairs if isinstance(name, str))
    return names
