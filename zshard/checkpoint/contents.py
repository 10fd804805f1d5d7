"""The contents of a checkpoint: names, and which rank holds which elements.

state_dict() determines what a model saves and under which names, including all hooks and overrides.
It runs with placeholders without values instead of parameters, so the result is a plan, in which
each placeholder means "the elements that this rank holds". No value moves.

The manifest's entry for an optimizer (`optimizer`). Its tensors are in files as
`<parameter>.<key>`, under the first name that named_parameters() gives the parameter:

    {"class": "torch.optim.adamw.AdamW",
     "groups": [{"params": [name, ...], "options": {name: encoded}}],
     "state": {parameter: {"tensors": [key, ...], "values": {key: encoded}}},
     "other": encoded}

`other`, if there is any, is a dict of the state under keys that are no parameters.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from zshard import _core
from zshard.checkpoint.checkpoint import is_extra_state
from zshard.checkpoint.safetensors import CODES, is_name
from zshard.checkpoint.script_state import encode
from zshard.guard.slices import to_local
from zshard.optim.hooks import know
from zshard.optim.sharded_state import (
    class_of_state,
    facts_of_other,
    held_by,
    other_state,
    takes_full_state,
)
from zshard.ranks.agreement import Fact, gather
from zshard.ranks.transports import comm_for
from zshard.state import state_dict_form
from zshard.state.load_state_dict import comm_of
from zshard.state.optimizer_names import names_of, refuse_clash
from zshard.state.stand_ins import Saved, StandIns
from zshard.units.shards import Entry, Part, part_of
from zshard.units.units import plain_name, units_of

_RANK_0, _EVERYONE = -2, -1  # groups; the other groups are those of units

_KINDS = (Tensor, nn.Parameter, nn.Buffer)  # subclasses may hold anything


SaveShare = tuple[int, int, int, int]
"""A rank's piece of a tensor to save: its first element, how many ranks have the same elements,
which of them it is, and a number of these ranks."""


class Contents(NamedTuple):
    """Everything that a model, an optimizer or an EMA has to save."""

    entries: list[Entry]
    tied: Mapping[str, str] = {}  # alias: name of an entry
    rest: Mapping[str, Any] = {}  # what is not a tensor, by name
    facts: Mapping[str, Any] = {}  # for the manifest; of inventory(): nn.Module's metadata
    nested: str = ""  # the entry that seems to hold this rank's shards within a list or dict


def ranks_of(model: nn.Module) -> _core.Comm:
    """Return the ranks that save a model together: those of its units or, without units, those of
    the default process group. Raises ValueError if units span different ranks."""
    if next(units_of(model), None) is not None:
        return comm_of(model)
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return comm_for(dist.group.WORLD if together else None, None, None)


class Replicas:
    """Number of ranks that hold the same elements as this one, per unit."""

    def __init__(self, model: nn.Module, comm: _core.Comm, ranks: Sequence[int]) -> None:
        """Collective. ranks: which ones count, this one among them."""
        self._comm, self._ranks = comm, ranks
        shards = {id(s.comms.shards): s.comms.shards for _, s in units_of(model)}
        parts = [each.rank for each in shards.values()]
        everyone = [parts]
        if any(each is not comm for each in shards.values()):
            everyone = gather(comm, parts)
        self._groups: dict[int, tuple[int, int, int]] = {}
        for i, (key, shard_comm) in enumerate(shards.items()):
            if shard_comm is comm:
                self._groups[key] = (1, 0, i)
                continue
            same = [rank for rank in ranks if everyone[rank][i : i + 1] == parts[i : i + 1]]
            self._groups[key] = (len(same), same.index(comm.rank), i)

    def share(self, entry: Entry) -> SaveShare | None:
        """Return this rank's share of a tensor to save; None: rank 0 saves it."""
        part, rank = entry.part, self._comm.rank
        if part is None:
            return (0, 1, 0, _RANK_0) if rank == 0 else None
        if not part.is_cut:
            return 0, len(self._ranks), self._ranks.index(rank), _EVERYONE
        return part.begin, *self._groups[id(part.shards)]


def facts_of(contents: Contents, what: str) -> list[Fact]:
    """Return the facts that must agree between ranks."""
    facts = [(f"{what} '{e.name}'", f"shape {e.shape}, {e.dtype}") for e in contents.entries]
    facts += [(f"'{name}'", f"tied to '{home}'") for name, home in contents.tied.items()]
    facts += [(f"'{name}'", "not a tensor") for name in contents.rest]
    return facts


# --- models ---------------------------------------------------------------------------------------


def of_model(model: nn.Module, dtype: torch.dtype | None) -> Contents:
    """Return what the model's state_dict() would contain. Call reshard_all() first.

    dtype: the dtype of floating-point tensors in the file; None keeps their dtypes.

    Raises what inventory() does, and TypeError for other entries that cannot be saved.
    """
    contents = inventory(model)
    entries = []
    for entry in contents.entries:
        values, part = to_local(entry.value).detach(), entry.part
        if part is not None and tuple(values.shape) != part.local_shape:
            if tuple(values.shape) != part.shape:
                change = f"changed from {part.local_shape} to {tuple(values.shape)}"
                raise RuntimeError(f"the shape of parameter '{part.name}' was {change}: restore it")
            values = part.of(values)  # after `param.data = full_tensor`
        stored = dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype
        entries.append(entry._replace(value=values, dtype=stored))
    versions = {
        plain_name(prefix): facts["version"]
        for prefix, facts in contents.facts.items()
        if isinstance(facts, Mapping) and facts.get("version", 1) != 1
    }
    facts = {
        "extra_state": {n: encode(value, f"'{n}'") for n, value in contents.rest.items()},
        "versions": encode(versions, "the module versions"),
    }
    return contents._replace(entries=entries, facts=facts)


def inventory(model: nn.Module) -> Contents:
    """Return the tensors of a model's state_dict(), without reading a value of a sharded parameter.
    Names are without the prefixes of wrappers.

    Raises RuntimeError if user code reads values of sharded parameters; TypeError and ValueError,
    which name the entry, for what cannot be saved.
    """
    state, parts = _state_of(model)
    # Placeholders are slow: take everything except the shape from the parameter.
    tensors = {
        name: value.origin if isinstance(value, Saved) else value
        for name, value in state.items()
        if isinstance(value, Tensor) and not is_extra_state(name)
    }
    for name, value in tensors.items():
        _check_tensor(name, value, id(value) in parts)
    tied = _tied_names(tensors, parts.keys(), _tied_patterns(model))
    entries = []
    for name, value in tensors.items():
        part = parts.get(id(value))
        shape = tuple(value.shape) if part is None else part.shape
        unit = part.unit if part is not None and part.is_cut else None
        if name not in tied:
            entries.append(Entry(name, shape, value.dtype, value, part, unit))
    rest = {name: value for name, value in state.items() if name not in tensors}
    return Contents(entries, tied, rest, state._metadata)


def _state_of(model: nn.Module) -> tuple[Any, dict[int, Part]]:
    """Return state_dict() with placeholders for the units' parameters, and {id: shard} of these
    parameters."""
    stand_ins: dict[int, Saved] = {}
    parts: dict[int, Part] = {}
    for param in model.parameters():
        part = part_of(param)
        if part is not None:
            parts[id(param)] = part
            stand_ins[id(param)] = Saved.of(param, part.shape, part.name)
    with ExitStack() as stack:
        for module in model.modules():
            items = module._parameters.items()
            if by_name := {n: stand_ins[id(p)] for n, p in items if id(p) in stand_ins}:
                stack.enter_context(StandIns(module, by_name))
        stack.enter_context(state_dict_form(model))
        state = model.state_dict()
    if not isinstance(state, Mapping):
        kind, got = type(model).__name__, type(state).__name__
        raise TypeError(f"state_dict() of {kind} must return a mapping, got {got}")
    named = OrderedDict((plain_name(n) if isinstance(n, str) else n, v) for n, v in state.items())
    for name in named:
        if not isinstance(name, str):
            raise TypeError(f"state dict keys must be strings, got {name!r}")
        if not is_name(name):
            raise ValueError(f"{name!r:.80} is not a valid tensor name for a safetensors file")
    named._metadata = getattr(state, "_metadata", None) or {}  # type: ignore[attr-defined]
    return named, parts


def _check_tensor(name: str, value: Tensor, is_param: bool = False) -> None:
    """Raise for a tensor that cannot be saved. is_param: it is the parameter of a unit."""
    if (not is_param and type(value) not in _KINDS) or value.layout != torch.strided:
        kind = f"'{name}' is a {type(value).__name__} of layout {value.layout}"
        raise TypeError(f"{kind}: convert it to a plain strided tensor (full_tensor(), to_dense())")
    if not is_param and _core.is_shard(value):
        text = f"'{name}' would contain only this rank's shard of a parameter"
        raise RuntimeError(f"{text}: tie, parametrize or share it before FSDP(...)")
    if value.is_meta:
        raise RuntimeError(f"'{name}' is on the meta device: initialize or load it first")
    if value.dtype not in CODES:
        text = f"'{name}' is of dtype {value.dtype}, which safetensors lacks"
        raise TypeError(f"{text}: convert it, or make the buffer persistent=False")


def _tied_names(
    tensors: Mapping[str, Tensor], params: Container[int], is_other: Callable[[str], bool]
) -> dict[str, str]:
    """Return {alias: name} of tensors with several names. A tensor is saved under its first name
    that the model does not list as tied."""
    names: dict[Any, list[str]] = {}
    for name, value in tensors.items():
        key: Any = id(value)
        if key not in params:  # equal for two names of one tensor, if it has elements
            shape = tuple(value.shape), value.stride()
            key = value.numel() and (value.data_ptr(), value.device, value.dtype, shape)
        names.setdefault(key or name, []).append(name)
    tied: dict[str, str] = {}
    for same in names.values():
        home = next((name for name in same if not is_other(name)), same[0])
        tied.update((name, home) for name in same if name != home)
    return tied


def _tied_patterns(model: nn.Module) -> Callable[[str], bool]:
    """Return a predicate: do Hugging Face's `_tied_weights_keys` list a name? A module's keys are
    names or regular expressions, relative to that module."""
    listed = [
        (f"{plain_name(prefix)}." if plain_name(prefix) else "", key)
        for prefix, module in model.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]

    def is_listed(name: str) -> bool:
        for prefix, key in listed:
            with suppress(re.error, TypeError):
                rest = name[len(prefix) :]
                if name.startswith(prefix) and (key == rest or re.search(key, rest)):
                    return True
        return False

    return is_listed


# --- optimizers -----------------------------------------------------------------------------------


def of_optimizer(model: nn.Module, optimizer: Optimizer) -> Contents:
    """Return the state to save for an optimizer over parameters of the model, ordered by state key.

    Raises TypeError for an object that is not a torch optimizer, and for state that cannot be
    saved, naming it; ValueError for a parameter that is not the model's.
    """
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {kind}")
    names = names_of(model, optimizer)
    know(optimizer)
    held = held_by(optimizer)
    shards = {id(row.param): row.shards for row in held}
    nested = (f"{row.nested} of '{row.part.name}'" for row in held if row.nested)
    state: Any = optimizer.state
    if takes_full_state(optimizer):
        state = optimizer.full_state()  # type: ignore[attr-defined]
    other = other_state(state)
    refuse_clash(other, names)
    by_key: dict[str, list[Entry]] = {}
    saved: dict[str, dict[str, Any]] = {}
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        tensors, values = [], {}
        name, shards_by_key = names[id(param)], shards.get(id(param), {})
        if not isinstance(state.get(param, {}), Mapping):
            raise TypeError(f"the optimizer state of '{name}' is not a dict, so it cannot be saved")
        for key, value in state.get(param, {}).items():
            if not isinstance(key, str):
                raise TypeError(f"optimizer state keys must be strings, got {key!r} for '{name}'")
            if isinstance(value, Tensor):
                value = to_local(value)
                _check_tensor(f"{name}.{key}", value)
                shard = shards_by_key.get(key)
                part = part_of(param) if shard is None else shard.part
                shape = tuple(value.shape) if shard is None else shard.shape
                if shard is None and part is not None and (part.is_cut or shape != part.shape):
                    part = None
                entry = Entry(f"{name}.{key}", shape, value.dtype, value.detach(), part)
                by_key.setdefault(key, []).append(entry)
                tensors.append(key)
            else:
                local = tree_map_only(Tensor, to_local, value)  # shards in it are refused later
                values[key] = encode(local, f"optimizer state '{key}' of '{name}'")
        if tensors or values:
            saved[name] = {"tensors": tensors, "values": values}
    entries = [entry for same in by_key.values() for entry in same]
    counts = Counter(entry.name for entry in entries)
    if wrong := [name for name, count in counts.items() if count > 1 or not is_name(name)]:
        raise ValueError(f"duplicate or invalid name in the optimizer state: '{wrong[0]:.80}'")
    state_class = class_of_state(optimizer)
    facts: dict[str, Any] = {
        "class": f"{state_class.__module__}.{state_class.__qualname__}",
        "groups": [_group(i, group, names) for i, group in enumerate(optimizer.param_groups)],
        "state": saved,
    }
    rest = {f"{name}.{key}": None for name, state in saved.items() for key in state["values"]}
    if other:
        facts["other"] = encode(other, "the optimizer's state")
        rest |= {f"{text}, {kind}": None for text, kind in facts_of_other(other)}
    return Contents(entries, rest=rest, facts=facts, nested=next(nested, ""))


def _group(i: int, group: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    options = {
        key: encode(value, f"option '{key}' of param group {i}")
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    return {"params": [names[id(param)] for param in group["params"]], "options": options}
