"""state_dict() and load_state_dict() of sharded modules: plain tensors under plain names.

The one idea: nn.Module walks, names and complains itself; of each module it asks two methods,
`_save_to_state_dict` and `_load_from_state_dict`. On the modules that own sharded parameters these
are replaced, on the instance, and while they run, stand-ins of whole shape take the parameters'
places. So the module's own code and its users' hooks meet whole tensors only, whichever module the
call began at. Saving, the stand-ins are whole copies, one unit gathered at a time. Loading, they
are shapes without memory, and what nn.Module copies in the end is this rank's slice of each given
tensor: loading needs no gather, and no rank has to wait for another.

Why methods and not hooks: a load hook of ours would have to run behind all others, also those that
are registered later, and a dict of hooks may not be put in order while nn.Module runs them. Nor is
there a hook that sees the whole of a call, which is what lets a unit be gathered once for all its
owners. Why instances and not classes: an owner may be any module below a unit, and its class stays.
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zshard import _core
from zshard._plan import UnitSpec
from zshard._units import is_unit


def attach(unit: _core.Unit, spec: UnitSpec) -> None:
    """Makes saving and loading of a sharded unit's parameters whole, from whichever module at or
    below the unit's the call begins."""
    params = _UnitParams(unit, [ref.param for ref in spec.params])
    # The unit's module too where it owns none: it is asked first, so it refuses before a change.
    _places_of(spec.module)
    for index, ref in enumerate(spec.params):
        for owner, attribute in ref.owners:
            _places_of(owner)[attribute] = _Place(params, index)
    for module in spec.module.modules():
        is_top = module is spec.module or is_unit(module)
        is_leaf = not module._modules  # one call asks it alone
        if not (is_top or is_leaf or isinstance(module.__dict__.get(_Whole.name), _Whole)):
            module.__dict__[_Whole.name] = _Whole(module)


def whole_state_dict(
    module: nn.Module, state_dict: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What `state_dict`, the method of `module`, returns; each unit is gathered once for it.

    Collective. Raises RuntimeError where a slice would get into the result.
    """
    if _outermost.get() is not None:
        return state_dict(*args, **kwargs)
    token = _outermost.set(_Copies(module.parameters()))
    try:
        state = state_dict(*args, **kwargs)
    finally:
        _outermost.reset(token)
    _refuse_slices(state)
    return state


# --- whole copies ---------------------------------------------------------------------------------


class _UnitParams:
    """The parameters of one sharded unit. It holds no module: a part of a model that lives on
    keeps the unit whose memory it lies on, and no other modules."""

    def __init__(self, unit: _core.Unit, params: list[nn.Parameter]) -> None:
        self.unit = unit
        self.params = params

    def copies(self, wanted: Collection[int]) -> dict[int, nn.Parameter]:
        """Whole copies of the parameters whose id is wanted, by id; one gather, so collective."""
        engine = self.unit.engine
        engine.open()
        try:
            held = self.unit.is_full  # by a forward that is running and goes on with it
            self.unit.unshard(True)
            try:
                chosen = [(i, p) for i, p in enumerate(self.params) if id(p) in wanted]
                return {id(param): self._copy(i, param) for i, param in chosen}
            finally:
                if not held:
                    self.unit.reshard()
        finally:
            engine.close()

    def _copy(self, index: int, param: nn.Parameter) -> nn.Parameter:
        shape = self.unit.param(index)["shape"]
        with torch.inference_mode(False):  # whoever gets it may write to it
            data = torch.empty(shape, dtype=param.dtype, device=param.device)
            self.unit.read_param(index, data)
            return _like(param, data)


@dataclass(eq=False, frozen=True)
class _Place:
    """What lies under one attribute of an owner: the parameter `index` of a unit."""

    params: _UnitParams
    index: int

    @property
    def unit(self) -> _core.Unit:
        return self.params.unit

    @property
    def param(self) -> nn.Parameter:
        return self.params.params[self.index]

    @property
    def name(self) -> str:
        return str(self.unit.param(self.index)["name"])

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole one."""
        return tuple(self.unit.param(self.index)["shape"])


class _Copies:
    """The whole copies that one call of state_dict() has made. Tied parameters share theirs."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        self._below = {id(param) for param in params}  # of a unit, what the call is about
        self._made: dict[int, nn.Parameter] = {}

    def of(self, place: _Place) -> nn.Parameter:
        """The copy of a parameter; the first one of a unit gathers it."""
        key = id(place.param)
        if key not in self._made:
            self._made.update(place.params.copies(self._below | {key}))
        return self._made[key]


_outermost: ContextVar[_Copies | None] = ContextVar("zshard_state_dict", default=None)


def _like(param: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """A parameter on `data` with all else, the user's attributes too, as `param` has it."""
    made = nn.Parameter(data, requires_grad=param.requires_grad)
    vars(made).update(vars(param))
    return made


def _refuse_slices(state: Any) -> None:
    """Raises RuntimeError for an entry that lies on a shard."""
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if isinstance(value, torch.Tensor) and _core.is_shard(value):
            raise RuntimeError(
                f"'{key}' would be only this rank's slice of a parameter in the state dict: it "
                "was tied, parametrized or given to another module after FSDP(...) (do so before), "
                "or a state_dict() of the model's own reads it past nn.Module's"
            )


# --- the methods on instances ---------------------------------------------------------------------


class _Override:
    """A method of one module, in that module's __dict__."""

    name: str

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)  # which holds this: no cycle to be collected
        self._patch = module.__dict__.get(self.name)  # somebody else's, from before

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise RuntimeError(f"{self.name}() of a module that is gone")
        return module

    def original(self) -> Callable[..., Any]:
        """What the module would run without this."""
        if self._patch is not None:
            return self._patch  # type: ignore[no-any-return]
        return types.MethodType(getattr(type(self.module), self.name), self.module)

    def __reduce__(self) -> Any:
        """A copy of a part, or a part from a pickle, is of no unit: it gets its own method back."""
        return operator.getitem, ((self.original(),), 0)


class _Whole(_Override):
    """state_dict() of a module that is no unit."""

    name = "state_dict"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return whole_state_dict(self.module, self.original(), args, kwargs)


class _OwnersMethod(_Override):
    """A method of an owner; `places` are those of its attributes that units hold."""

    def __init__(self, module: nn.Module, places: dict[str, _Place]) -> None:
        super().__init__(module)
        self.places = places

    def in_use(self) -> dict[str, _Place]:
        """The places that hold their parameter now; what a user put there instead is theirs."""
        there = self.module._parameters
        return {name: p for name, p in self.places.items() if there.get(name) is p.param}


class _Save(_OwnersMethod):
    """nn.Module's `_save_to_state_dict`, with whole copies in the places. Collective."""

    name = "_save_to_state_dict"

    def __call__(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        used = self.in_use()
        copies = _outermost.get() or _Copies(iter([place.param for place in used.values()]))
        whole = {name: copies.of(place) for name, place in used.items()}
        with _StandIns(self.module, whole):
            self.original()(destination, prefix, keep_vars)


class _Load(_OwnersMethod):
    """nn.Module's `_load_from_state_dict` for whole tensors. Raises ValueError for assign=True;
    wrong shapes are nn.Module's errors, with whole shapes."""

    name = "_load_from_state_dict"

    def __call__(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if local_metadata.get("assign_to_params_buffers", False):
            raise ValueError(
                "load_state_dict(assign=True) would replace sharded parameters; "
                "leave assign out: values are copied into the shards"
            )
        used = self.in_use()
        for place in used.values():
            if place.unit.is_full:  # kept by a forward for its backward, which gathers it again
                place.unit.reshard()
        outlines = {name: _Outline.of(place) for name, place in used.items()}
        with _StandIns(self.module, outlines) as stand_ins:
            # Registered now, so it runs behind all others: they are to see whole shapes, and
            # nn.Module, which goes on behind this one, the slices.
            last = functools.partial(self._cut, stand_ins)
            handle = self.module._register_load_state_dict_pre_hook(last)  # type: ignore[no-untyped-call]
            try:
                rest = (strict, missing_keys, unexpected_keys, error_msgs)
                self.original()(state_dict, prefix, local_metadata, *rest)
            finally:
                handle.remove()

    def _cut(self, stand_ins: _StandIns, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """The last load hook: the module gets its shards back, and their slices to copy."""
        stand_ins.end()
        for name, place in self.in_use().items():
            key = prefix + name
            if key in state:
                state[key] = _slice(place, key, state[key], rest[-1])


def _places_of(module: nn.Module) -> dict[str, _Place]:
    """The places of an owner, to be added to; the first time, its methods are replaced."""
    known = module.__dict__.get(_Save.name)
    if isinstance(known, _Save):
        return known.places
    places: dict[str, _Place] = {}
    for method in (_Save, _Load):
        module.__dict__[method.name] = method(module, places)
    return places


# --- stand-ins ------------------------------------------------------------------------------------


class _StandIns:
    """Context in which a module has other parameters, by attribute, in the places of its own."""

    def __init__(self, module: nn.Module, params: Mapping[str, nn.Parameter]) -> None:
        self._places = module._parameters
        self._params = params
        self._own = {name: self._places[name] for name in params}

    def __enter__(self) -> _StandIns:
        self._places.update(self._params)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Puts the module's own back, but not over what somebody else put there meanwhile."""
        for name, param in self._params.items():
            if self._places.get(name) is param:
                self._places[name] = self._own[name]


# What may be asked of an outline: facts, and other tensors of its shape and dtype.
_FACTS = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device")),
    *(getattr(torch.Tensor, name).__get__ for name in ("layout", "requires_grad", "is_meta")),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "__len__", "__hash__")),
    *(getattr(torch.Tensor, name) for name in ("is_floating_point", "is_complex")),
    *(getattr(torch.Tensor, f"new_{what}") for what in ("empty", "zeros", "ones", "full")),
    *(getattr(torch, f"{what}_like") for what in ("empty", "zeros", "ones", "full")),
}
# What may be done after an outline's example to another tensor, which comes first.
_LIKENESSES = {
    getattr(torch.Tensor, name) for name in ("expand_as", "reshape_as", "view_as", "type_as", "to")
}
_ITSELF = {torch.Tensor.detach, torch.Tensor.data.__get__}  # type: ignore[attr-defined]


class _Outline(nn.Parameter):
    """What a load hook sees of a sharded parameter: shape, dtype and device of the whole. It has no
    values: reading or writing them is a RuntimeError. Put into the state dict, it means "as it is".
    """

    place: _Place

    @staticmethod
    def of(place: _Place) -> _Outline:
        param = place.param
        element = torch.empty((), dtype=param.dtype, device=param.device)
        whole = element.expand(place.shape)
        made: _Outline = torch.Tensor._make_subclass(_Outline, whole, param.requires_grad)
        vars(made).update(vars(param), place=place)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ITSELF:
            return args[0]
        if func in _FACTS or (func in _LIKENESSES and not isinstance(args[0], cls)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        used = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise RuntimeError(
            f"{getattr(func, '__name__', func)}() on parameter '{used.place.name}' while its "
            "module is loaded: a load hook sees the shape and dtype of a sharded parameter, its "
            "values are not there (take them from state_dict() before, or change them after)"
        )


def _slice(place: _Place, key: str, value: Any, error_msgs: list[str]) -> Any:
    """What nn.Module is to copy into this rank's shard, given a whole tensor."""
    if not torch.overrides.is_tensor_like(value):  # type: ignore[no-untyped-call]
        return value  # nn.Module's error
    local, whole = place.param.detach(), place.shape
    if isinstance(value, _Outline) and value.place.param is place.param:
        return local
    if value is place.param:  # torch.distributed.checkpoint fills in what a state dict leaves out
        return local
    if whole == () and tuple(value.shape) == (1,):
        value = value[0]  # nn.Module takes scalars from old files so
    if tuple(value.shape) != whole:
        error_msgs.append(
            f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, "
            f"the shape in current model is {torch.Size(whole)}."
        )
        return local
    if tuple(local.shape) == whole:  # this rank's alone, or the user's `p.data = whole`
        return value
    fact = place.unit.param(place.index)
    part = value.detach().reshape(-1)[fact["begin"] : fact["begin"] + fact["numel"]]
    return part.reshape(local.shape)
