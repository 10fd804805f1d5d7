"""What a model and an optimizer have to save: names, and whose each element is.

The one idea: state_dict() says what a model saves and under which names, with all hooks and methods
of its users. It is run over stand-ins without values in the places of parameters; so what comes out
is a plan, in which each stand-in means "the elements that this rank has". No value moves for it.

What the manifest says of an optimizer (`optimizer`), beside its tensors, which are in files as
`<parameter>.<key>`, each under the first name that named_parameters() gives the parameter:

    {"class": "torch.optim.adamw.AdamW",
     "groups": [{"params": [name, ...], "options": {name: encoded}}],
     "state": {parameter: {"tensors": [key, ...], "values": {key: encoded}}}}
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zshard import _core
from zshard._agree import Fact, gather_bytes
from zshard._checkpoint.extra import encode
from zshard._checkpoint.safetensors import CODES, is_name
from zshard._group import comm_for
from zshard._optim_names import names_of
from zshard._optim_state import held_by
from zshard._outline import Saved, StandIns
from zshard._parts import Part, part_of
from zshard._plain_names import plain
from zshard._state_dict_type import state_dict_type
from zshard._stream import comm_of
from zshard._units import units_of

_RANK_0, _EVERYONE = -2, -1  # groups; the others are those of units

_KINDS = (Tensor, nn.Parameter, nn.Buffer)  # of subclasses nobody knows what is in them


class Held(NamedTuple):
    """What this rank has of a tensor, and who has the same."""

    values: Tensor  # of any shape: its row-major elements are
    begin: int  # those of the whole tensor from this one on
    copies: int  # so many ranks have them,
    copy: int  # and this is the one of that number.
    group: int  # Who has them is the same for all items of one number.


class Item(NamedTuple):
    """A tensor to be saved."""

    name: str
    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype  # in the file
    held: Held | None  # None: nothing on this rank


class Contents(NamedTuple):
    """All that a model or an optimizer has to save."""

    items: list[Item]
    tied: dict[str, str]  # another name: the one of an item
    told: dict[str, Any]  # for the manifest
    others: list[str]  # names of what is no tensor
    nested: str = ""  # what seems to hold this rank's slices within a list or dict


def ranks_of(model: nn.Module) -> _core.Comm:
    """The ranks that save a model together: those of its units; of a model without, all of the
    default process group. ValueError where units are over different ranks."""
    if next(units_of(model), None) is not None:
        return comm_of(model)
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return comm_for(dist.group.WORLD if together else None, None, None)


class Copies:
    """How many ranks have the elements that this one has, unit by unit."""

    def __init__(self, model: nn.Module, comm: _core.Comm) -> None:
        """Collective."""
        self._comm = comm
        shards = {id(s.comms.shards): s.comms.shards for _, s in units_of(model)}
        parts = array("q", [each.rank for each in shards.values()])
        everyone = [parts]
        if any(each is not comm for each in shards.values()):
            everyone = [array("q", data) for data in gather_bytes(comm, parts.tobytes())]
        self._known: dict[int, tuple[int, int, int]] = {}
        for i, (key, each) in enumerate(shards.items()):
            same = [r for r, their in enumerate(everyone) if their[i : i + 1] == parts[i : i + 1]]
            row = (1, 0) if each is comm else (len(same), same.index(comm.rank))
            self._known[key] = (*row, i)

    def held(self, part: Part, values: Tensor) -> Held:
        """Of a tensor that is cut as a parameter is, this rank's elements."""
        if not part.is_cut:
            return Held(values, 0, self._comm.world, self._comm.rank, _EVERYONE)
        return Held(values, part.begin, *self._known[id(part.shards)])

    def from_rank_0(self, values: Tensor) -> Held | None:
        """Of a tensor of which rank 0's values count."""
        return Held(values, 0, 1, 0, _RANK_0) if self._comm.rank == 0 else None


def facts_of(contents: Contents, what: str) -> list[Fact]:
    """What the ranks have to agree on."""
    facts = [
        (f"{what} '{each.name}'", f"shape {each.shape}, {each.dtype}") for each in contents.items
    ]
    facts += [(f"'{name}'", f"another name of '{home}'") for name, home in contents.tied.items()]
    facts += [(f"'{name}'", "no tensor") for name in contents.others]
    return facts


# --- models ---------------------------------------------------------------------------------------


def of_model(model: nn.Module, copies: Copies, dtype: torch.dtype | None) -> Contents:
    """What the model's state_dict() would have; this rank's parameters have to be at rest.

    dtype: in which its floating-point tensors are written; None: as they are.
    Raises RuntimeError where code of the user's asks for values of sharded parameters, TypeError
    and ValueError for what cannot be kept, naming the entry.
    """
    state, parts = _state_of(model)
    # A stand-in answers slowly, so its parameter is asked for all but the shape.
    tensors = {
        name: value.origin if isinstance(value, Saved) else value
        for name, value in _checked_names(state)
        if isinstance(value, Tensor) and not is_extra_state(name)
    }
    for name, value in tensors.items():
        _check_tensor(name, value, id(value) in parts)
    tied = _tied_names(tensors, parts.keys(), _tied_patterns(model))
    items = []
    for name, value in tensors.items():
        if name not in tied:
            part = parts.get(id(value))
            shape = tuple(value.shape) if part is None else part.shape
            stored = dtype if dtype is not None and value.dtype.is_floating_point else value.dtype
            held = copies.from_rank_0(value.detach())
            if part is not None:
                held = copies.held(part, _at_rest(value, part))
            items.append(Item(name, shape, stored, held))
    others = {n: encode(v, f"'{n}'") for n, v in state.items() if n not in tensors}
    versions = {
        plain(prefix): facts["version"]
        for prefix, facts in state._metadata.items()
        if isinstance(facts, Mapping) and facts.get("version", 1) != 1
    }
    told = {"extra_state": others, "versions": encode(versions, "the versions of modules")}
    return Contents(items, tied, told, list(others))


def settle(model: nn.Module) -> None:
    """Has all parameters lie as they do between steps. RuntimeError in a forward or backward, and
    where unshard() or summon_full_params() has made them whole."""
    for _, state in units_of(model):
        held = [name for p in state.unit.params if (name := _core.held_unit(p)) is not None]
        if held:
            raise RuntimeError(
                f"the parameters of unit '{held[0] or '(root)'}' are whole copies, made by "
                "unshard() or summon_full_params(): save when these have ended"
            )
        try:
            state.unit.let_go()
        except RuntimeError as error:
            raise RuntimeError(f"a model is saved between steps: {error}") from None


def _state_of(model: nn.Module) -> tuple[Any, dict[int, Part]]:
    """state_dict() with stand-ins in the places of the units' parameters; these parameters' parts,
    by their ids."""
    made: dict[int, Saved] = {}
    parts: dict[int, Part] = {}
    for param in model.parameters():
        part = part_of(param)
        if part is not None:
            parts[id(param)] = part
            made[id(param)] = Saved.of(param, part.shape, part.name)
    with ExitStack() as stack:
        for module in model.modules():
            own = {n: made[id(p)] for n, p in module._parameters.items() if id(p) in made}
            if own:
                stack.enter_context(StandIns(module, own))
        stack.enter_context(state_dict_type(model, "FULL_STATE_DICT"))
        state = model.state_dict()
    if not isinstance(state, Mapping):
        raise TypeError(f"state_dict() of {type(model).__name__} gave a {type(state).__name__}")
    named = OrderedDict((plain(n) if isinstance(n, str) else n, v) for n, v in state.items())
    named._metadata = getattr(state, "_metadata", None) or {}  # type: ignore[attr-defined]
    return named, parts


def _at_rest(param: Tensor, part: Part) -> Tensor:
    """This rank's elements of a parameter."""
    values = param.detach()
    if tuple(values.shape) != part.local_shape:
        if tuple(values.shape) != part.shape:
            raise RuntimeError(
                f"parameter '{part.name}' has been given another shape, {tuple(values.shape)}, in "
                f"place of {part.local_shape}: only values may be set"
            )
        values = part.of(values)  # the user's `param.data = whole`
    return values


def _checked_names(state: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if not isinstance(name, str):
            raise TypeError(f"the state dict has {name!r} as a key: names are strings")
        if not is_name(name) or name == "__metadata__":
            raise ValueError(f"{name!r:.80} cannot be the name of a tensor in a file")
        yield name, value


def is_extra_state(name: str) -> bool:
    """Is it what a module's get_extra_state() gave? set_extra_state() wants values, so a tensor of
    that name is not read in parts as the others are."""
    return name.rpartition(".")[2] == "_extra_state"


def _check_tensor(name: str, value: Tensor, is_param: bool = False) -> None:
    """Raises where a tensor cannot be in a file. is_param: it is a unit's parameter itself."""
    if (not is_param and type(value) not in _KINDS) or value.layout != torch.strided:
        raise TypeError(
            f"'{name}' is a {type(value).__name__} of layout {value.layout}: only plain tensors "
            "can be saved"
        )
    if not is_param and _core.is_shard(value):
        raise RuntimeError(
            f"'{name}' would be only this rank's slice of a parameter: it was tied, parametrized "
            "or given to another module after FSDP(...) (do so before), or a state_dict() of the "
            "model's own reads it past nn.Module's"
        )
    if value.is_meta:
        raise RuntimeError(f"'{name}' is on the meta device: it has no values to save")
    if value.dtype not in CODES:
        raise TypeError(f"'{name}' is of {value.dtype}, which safetensors files do not have")


def _tied_names(
    tensors: Mapping[str, Tensor], params: Container[int], is_other: Callable[[str], bool]
) -> dict[str, str]:
    """Of tensors with several names, {name: the one it is saved under}: the first, but for those of
    which the model says that they are not to be saved."""
    names: dict[Any, list[str]] = {}
    for name, value in tensors.items():
        key = id(value) if id(value) in params else _identity(value)
        names.setdefault(key or name, []).append(name)
    tied: dict[str, str] = {}
    for same in names.values():
        home = next((name for name in same if not is_other(name)), same[0])
        tied.update((name, home) for name in same if name != home)
    return tied


def _identity(value: Tensor) -> Any:
    """What two names of one tensor have in common; None where it has no elements."""
    if value.numel() == 0:
        return None
    return value.data_ptr(), value.device, value.dtype, tuple(value.shape), value.stride()


def _tied_patterns(model: nn.Module) -> Callable[[str], bool]:
    """Whether Hugging Face's `_tied_weights_keys`, of the model or a part of it, list a name; they
    are names or regular expressions, from their module on."""
    listed = [
        (f"{plain(prefix)}." if plain(prefix) else "", key)
        for prefix, module in model.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]

    def is_listed(name: str) -> bool:
        return any(
            name.startswith(prefix) and _matches(key, name[len(prefix) :]) for prefix, key in listed
        )

    return is_listed


def _matches(key: Any, name: str) -> bool:
    try:
        return key == name or re.search(key, name) is not None
    except (re.error, TypeError):
        return False


# --- optimizers -----------------------------------------------------------------------------------


def of_optimizer(model: nn.Module, optimizer: Optimizer, copies: Copies) -> Contents:
    """What an optimizer over parameters of the model has, the tensors of one kind side by side.

    Raises TypeError for what is no optimizer of torch's kind or cannot be kept, naming it;
    ValueError for a parameter that is none of the model's.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    names = names_of(model, optimizer)
    held = held_by(optimizer)
    cut = {id(each.param): {k: c for k, _, c in each.entries} for each in held}
    nested = (f"{each.nested} of '{each.part.name}'" for each in held if each.nested)
    by_key: dict[str, list[Item]] = {}
    told_state: dict[str, dict[str, Any]] = {}
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        tensors, values = [], {}
        name, is_cut = names[id(param)], cut.get(id(param), {})
        for key, value in optimizer.state.get(param, {}).items():
            if not isinstance(key, str):
                raise TypeError(f"the optimizer's state of '{name}' has the key {key!r}, no string")
            if isinstance(value, Tensor):
                _check_tensor(f"{name}.{key}", value)
                item = _of_state(f"{name}.{key}", param, value, is_cut.get(key, False), copies)
                by_key.setdefault(key, []).append(item)
                tensors.append(key)
            else:
                values[key] = encode(value, f"the optimizer's state '{key}' of '{name}'")
        if tensors or values:
            told_state[name] = {"tensors": tensors, "values": values}
    items = [item for same in by_key.values() for item in same]
    _check_unique(items)
    kind = type(optimizer)
    told = {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "groups": [_group(i, group, names) for i, group in enumerate(optimizer.param_groups)],
        "state": told_state,
    }
    others = [f"{name}.{key}" for name, own in told_state.items() for key in own["values"]]
    return Contents(items, {}, told, others, next(nested, ""))


def _of_state(name: str, param: Tensor, value: Tensor, is_cut: bool, copies: Copies) -> Item:
    part, value = part_of(param), value.detach()
    shape, held = tuple(value.shape), copies.from_rank_0(value)
    if part is not None and is_cut:
        shape, held = part.shape, copies.held(part, value)
    elif part is not None and not part.is_cut and shape == part.shape:
        held = copies.held(part, value)
    return Item(name, shape, value.dtype, held)


def _check_unique(items: list[Item]) -> None:
    seen: set[str] = set()
    for item in items:
        if item.name in seen or not is_name(item.name) or item.name == "__metadata__":
            raise ValueError(
                f"the optimizer's state has '{item.name:.80}' twice, or it is no name for a tensor"
            )
        seen.add(item.name)


def _group(i: int, group: Mapping[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    options = {
        key: encode(value, f"option '{key}' of the optimizer's group {i}")
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    return {"params": [names[id(param)] for param in group["params"]], "options": options}
