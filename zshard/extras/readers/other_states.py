"""The state of an optimizer as torch.distributed.checkpoint has it: by number, or flat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from zshard.api import OptimizerState, params_of, plain_name, without_parameters
from zshard.extras.readers.chunked import Chunked

KeyPath = tuple[Any, ...]  # keys of nested dicts and lists


class _ByNumber(OptimizerState):
    """The state of optimizer.state_dict(), which may know parameters by number."""

    def fitted(
        self, optimizer: Optimizer, names: Mapping[int, str]
    ) -> tuple[OptimizerState, list[str]]:
        """As in torch, the parameter is the one at the same place in the param groups."""
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


class _Flat(OptimizerState):
    """The state of the flat format, which has options for each parameter: one group each."""

    def fitted(
        self, optimizer: Optimizer, names: Mapping[int, str]
    ) -> tuple[OptimizerState, list[str]]:
        """Parameters of one group must have the same options."""
        groups, problems = [], []
        options = {
            plain_name(group["params"][0]): {k: v for k, v in group.items() if k != "params"}
            for group in self.groups
        }
        for i, group in enumerate(optimizer.param_groups):
            own = [names[id(p)] for p in group["params"] if names[id(p)] in options]
            first = options[own[0]] if own else {}
            problems += [
                f"'{name}' and '{own[0]}' are both in param group {i}, but the checkpoint has "
                "different options for them"
                for name in own
                if options[name] != first
            ]
            groups.append({**first, "params": own})
        return replace(self, groups=groups), problems


def optimizer_of_paths(
    tensors: Mapping[KeyPath, Chunked], values: Mapping[KeyPath, Any], params: Sequence[str]
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
    state: dict[str, dict[str, Any]] = {}
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
    return _ByNumber(None, listed, state, others, other=rest)


def _flat_optimizer(
    tensors: Mapping[KeyPath, Chunked], values: Mapping[KeyPath, Any], params: set[str]
) -> OptimizerState:
    """Return the state of the flat format, in which each parameter has its own options."""
    state: dict[str, dict[str, Any]] = {}
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
    groups = [{**own, "params": [name]} for name, own in options.items()]
    return _Flat(None, groups, state, others)


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


def _option(value: Any, tensor: Chunked | None) -> Any:
    """Return the value of an option, which is read if it is a tensor, such as a learning rate."""
    return value if tensor is None else tensor.value()


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
