"""Placeholder tensors with shape, dtype and device but no values. Load hooks see them before values
are copied, save hooks see them instead of the saved values.

Code that runs while a model is loaded (nn.Module's, a user's hook) may read such a tensor's shape,
dtype and device. Any use of its values is an error that names the tensor, so no code computes with
values that do not exist. zshard's own code reads many shapes and dtypes, so it runs within `with
plain():`, where that is fast and unchecked.

Where state_dict() needs values, full copies replace the placeholders. The first copy of a unit's
parameter gathers the unit, for all that the call copies of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zshard import _core
from zshard.guard.whole_values import new_full, read_full
from zshard.units.moment import ELSEWHERE, is_now, refuse
from zshard.units.shards import Entry, entry_of
from zshard.units.units import State, without_memory

# Allowed queries: facts, and other tensors of its shape and dtype.
_FACTS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device")),
    *(getattr(Tensor, name).__get__ for name in ("layout", "requires_grad", "is_meta")),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "__len__", "__hash__")),
    *(getattr(Tensor, name) for name in ("is_floating_point", "is_complex")),
    *(getattr(Tensor, f"new_{what}") for what in ("empty", "zeros", "ones", "full")),
    *(getattr(torch, f"{what}_like") for what in ("empty", "zeros", "ones", "full")),
}
# Allowed operations that modify another tensor, which comes first.
_LIKENESSES = {getattr(Tensor, n) for n in ("expand_as", "reshape_as", "view_as", "type_as", "to")}
_COPIES = {getattr(Tensor, name) for name in ("clone", "contiguous", "cpu")}
_ITSELF = {Tensor.detach, Tensor.data.__get__}  # type: ignore[attr-defined]


class _Valueless:
    label: str

    def complaint(self) -> str:
        """Return why there are no values, and what to do."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _ITSELF or (func in _COPIES and isinstance(args[0], Saved)):
            return args[0]
        if func in _FACTS or (func in _LIKENESSES and not isinstance(args[0], _Valueless)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and isinstance(args[0], Pending) and args[1] == 0:
            return args[0].only()
        if func is Tensor.__deepcopy__ and isinstance(args[0], Pending):
            return args[0]
        used = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Valueless))
        raise RuntimeError(f"cannot call {getattr(func, '__name__', func)}() on {used.complaint()}")


class StandIn(_Valueless, nn.Parameter):
    """Stands in for a sharded parameter in load hooks: shape, dtype and device of the full one. In
    a state dict it means "unchanged". `origin` is the parameter."""

    origin: nn.Parameter

    @classmethod
    def of(cls, param: nn.Parameter, shape: tuple[int, ...], name: str) -> Self:
        whole = torch.empty((), dtype=param.dtype, device=param.device).expand(shape)
        made: Self = Tensor._make_subclass(cls, whole, param.requires_grad)
        vars(made).update(vars(param), origin=param, label=name)
        return made

    def complaint(self) -> str:
        return (
            f"parameter '{self.label}' while its module is loaded: load hooks see a sharded "
            "parameter's shape and dtype, but not its values. Read them from state_dict() before "
            "loading, or modify them after"
        )


class Saved(StandIn):
    """The same for code that builds a state dict to save. Its values go to the file unchanged, so a
    copy of it is itself."""

    def complaint(self) -> str:
        return (
            f"parameter '{self.label}' while its checkpoint is saved: hooks and methods of "
            "state_dict() see its shape and dtype and may rename or drop it, but its values are "
            "sharded over ranks and cannot be used"
        )


class Source(Protocol):
    """Reads the values of Pending tensors."""

    def read(self, origin: Any, begin: int, target: Tensor) -> None:
        """Fill `target` with row-major elements of the tensor `origin` from `begin` on, cast to its
        dtype."""


class Pending(_Valueless, Tensor):
    """Stands in for a tensor that is not read yet, in load hooks: elements of `origin`, its key in
    the source, from `begin` on, in row-major order."""

    origin: Any
    source: Source
    begin: int
    keeps_dtype = False  # of optimizer state, whose parameter was saved in the dtype it has here

    @classmethod
    def of(
        cls,
        name: str,
        origin: Any,
        source: Source,
        shape: tuple[int, ...] | None = None,
        begin: int = 0,
    ) -> Self:
        """origin: has a shape and a dtype. shape: of the elements; default: all of `origin`."""
        shape = tuple(origin.shape) if shape is None else shape
        made: Self = Tensor._make_subclass(cls, torch.empty((), dtype=origin.dtype).expand(shape))
        made.label, made.origin, made.source, made.begin = name, origin, source, begin
        return made

    def part(self, begin: int, shape: tuple[int, ...]) -> Pending:
        """Return the elements from `begin` on, as many as `shape` has."""
        return Pending.of(self.label, self.origin, self.source, shape, self.begin + begin)

    def only(self) -> Pending:
        """Return the element of a tensor of shape (1,), as which old files store scalars."""
        if tuple(self.shape) != (1,):
            raise RuntimeError(f"cannot index {self.complaint()}")
        return self.part(0, ())

    def complaint(self) -> str:
        return (
            f"'{self.label}', whose values are read only after all checks: load hooks may rename, "
            "drop or replace it. If a hook needs values, use load_state_dict() with full "
            "tensors"
        )


class StandIns:
    """Context manager that replaces parameters of a module, by attribute."""

    def __init__(self, module: nn.Module, params: Mapping[str, nn.Parameter]) -> None:
        self._places = module._parameters
        self._params = params
        self._own = {name: self._places[name] for name in params}

    def __enter__(self) -> StandIns:
        self._places.update(self._params)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Restore the module's own parameters, except where other code has replaced them since."""
        for name, param in self._params.items():
            if self._places.get(name) is param:
                self._places[name] = self._own[name]


class FullCopies:
    """The full copies of one call of state_dict(). Tied parameters share theirs.

    All are of one step, also where other ranks continue to train: the first one begins a session. A
    call without copies, such as that of zshard.save(), waits for no rank.
    """

    def __init__(
        self, params: Iterator[nn.Parameter], begin: Callable[[], object], keep: bool = True
    ) -> None:
        """keep: if False, this rank only takes part: copies have shapes only."""
        self._below = {id(param) for param in params}  # a unit's, in this call
        self._begin = begin
        self._keep = keep
        self._has_begun = False
        self._copies: dict[int, nn.Parameter] = {}
        self.owners: dict[int, State] = {}
        """The units of the copies in the result, by the identity of the copies' storages."""

    def of(self, entry: Entry) -> nn.Parameter:
        """Return the copy of a unit's parameter; the first one of a unit gathers it. Raises
        RuntimeError if another rank has been given all of it."""
        param, state = entry.value, entry.part.state if entry.part is not None else None
        if id(param) not in self._copies:
            if state is not None and is_now(state, ELSEWHERE):
                if self._keep:
                    refuse([state], f"read the full '{entry.name}'", ELSEWHERE)
                return without_memory(param, entry.shape, param.device)
            if entry.unit is not None:
                self._gather(entry.unit, self._below | {id(param)})
        copy = self._copies[id(param)]
        if self._keep and state is not None and copy.numel() > 0:
            self.owners[copy.untyped_storage()._cdata] = state
        return copy

    def _gather(self, unit: _core.Unit, wanted: Collection[int]) -> None:
        """Copy those of the unit's parameters whose id is wanted. Collective."""
        if not (unit.is_pinned or self._has_begun):
            self._has_begun = True
            self._begin()
        entries = [entry_of(param, unit) for param in unit.params if id(param) in wanted]
        values = [new_full(entry) if self._keep else None for entry in entries]
        read_full(entries, values)
        for entry, value in zip(entries, values, strict=True):
            param = entry.value
            if value is None:
                self._copies[id(param)] = without_memory(param, entry.shape, param.device)
                continue
            with torch.inference_mode(False):
                self._copies[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
            vars(self._copies[id(param)]).update(vars(param))


current_copies: ContextVar[FullCopies | None] = ContextVar("zshard_state_dict", default=None)
"""Those of the call that is running, if one is."""
