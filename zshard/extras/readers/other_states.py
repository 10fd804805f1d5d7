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
        numbers = [number for group in self.groups for number in group["params"]]
        if not numbers or not all(type(number) is int for number in numbers):
            return self, []
        saved = [len(group["params"]) for group in self.groups]
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        name_of = {n: names[id(p)] for n, p in zip(numbers, params_of(optimizer), strict=False)}
        if saved != sizes or not name_of.keys() >= self.tensors.keys() | self.values.keys():
            nothing = replace(self, groups=[{"params": []} for _ in sizes], tensors={}, values={})
            return nothing, [f"its param groups have {saved} parameters, the optimizer's {sizes}"]
        groups = [{**g, "params": [name_of[n] for n in g["params"]]} for g in self.groups]
        tensors = {name_of[n]: state for n, state in self.tensors.items()}
        values = {name_of[n]: state for n, state in self.values.items()}
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
            held = [names[id(p)] for p in group["params"] if names[id(p)] in options]
            first = options[held[0]] if held else {}
            problems += [
                f"'{name}' and '{held[0]}' are both in param group {i}, but the checkpoint has "
                "different options for them"
                for name in held
                if options[name] != first
            ]
            groups.append({**first, "params": held})
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
    for group in listed:  # torch flattens lists that contain tensors, into any order
        lists = {k: v for k, v in group.items() if isinstance(v, dict) and v}
        lists = {k: v for k, v in lists.items() if v.keys() == set(range(len(v)))}
        group.update({k: [v[i] for i in range(len(v))] for k, v in lists.items()})
    names: dict[str, str] = {}  # of parameters, by their key in the state, as text
    for group in listed:
        params = group.get("params", [])
        named = group.get("param_names", params)
        if isinstance(params, list) and isinstance(named, list) and len(params) == len(named):
            pairs = zip(params, named, strict=True)
            names.update((str(param), name) for param, name in pairs if isinstance(name, str))
    in_groups = {str(param) for group in listed for param in group.get("params", ())}
    state: dict[str, dict[str, Any]] = {}
    others: dict[str, dict[str, Any]] = {}
    rest: dict[Any, Any] = {}
    for kind, into in ((tensors, state), (values, others)):
        for path, value in kind.items():
            if path[0] != "state":
                continue
            if len(path) > 1 and isinstance(path[1], str) and path[1] not in in_groups:
                _put(rest, path[1:], value)
            elif len(path) != 3 or not isinstance(path[2], str):
                raise KeyError(path)
            else:
                into.setdefault(_named(path[1], names), {})[path[2]] = value
    states = [{**state.get(n, {}), **others.get(n, {})} for n in {**state, **others}]
    if without_parameters(rest, states).keys() != rest.keys():
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
                text = key[len(prefix) :]  # "<parameter>.<rest>": both may have dots
                ends = [i for i, char in enumerate(text) if char == "." and text[:i] in params]
                if not ends:
                    raise KeyError(text)
                option = _option(value, tensors.get((key,))) if into is options else value
                into.setdefault(text[: ends[-1]], {})[text[ends[-1] + 1 :]] = option
    if not options:
        raise KeyError("param_groups")
    groups = [{**each, "params": [name]} for name, each in options.items()]
    return _Flat(None, groups, state, others)


def _put(into: dict[Any, Any], path: KeyPath, value: object) -> None:
    for key in path[:-1]:
        into = into.setdefault(key, {})
        if not isinstance(into, dict):
            return
    into[path[-1]] = value


def _option(value: Any, tensor: Chunked | None) -> Any:
    """Return the value of an option, which is read if it is a tensor, such as a learning rate."""
    return value if tensor is None else tensor.value()


def _named(key: object, names: Mapping[str, str]) -> Any:
    """Return a parameter's name, or its number as text if the file has no names."""
    return int(str(key)) if not names and str(key).isdecimal() else names[str(key)]
