"""Load a sharded model in two steps: first check everything, then read values one chunk at a time.

nn.Module loads as always, with its hooks and errors, but its copies are recorded instead of
executed. The result is a plan, which lists each of this rank's shards with the value to load into
it. Once all ranks have a plan, values go from their source directly into the shards
(state/source.py).

It is an error if ranks load alone, or load different values; the model detects that
(csrc/engine/history.h). It gets a number for each loaded parameter, which is the same on ranks that
load the same.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zshard import _core
from zshard.guard.slices import to_local
from zshard.ranks.agreement import PublicCall, on_all_ranks
from zshard.state.source import Copy, FromRank0, LoadPlan, NotedLoad, pending, planned
from zshard.units.moment import PASS, refuse
from zshard.units.units import units_of

_SETTER, _HOOKS = "set_extra_state", "_load_state_dict_post_hooks"
_SAMPLES = 16  # elements of a loaded tensor that identify it


@PublicCall("load_state_dict()")
def load_state_dict(
    model: nn.Module,
    state: Mapping[str, Any] | None,
    *,
    strict: bool = True,
    from_rank0: bool = False,
) -> Any:
    """Load an unsharded state dict into a sharded model; change nothing unless all of it fits.

    Collective: call it on all ranks, outside forward and backward.

    model: a model with FSDP modules; its parameters and buffers are written in place.
    state: {name: tensor} as from state_dict(), with full shapes. Dtypes are cast, within
        floating-point, complex and integer dtypes.
    strict: raise an error for missing and unexpected names.
    from_rank0: only rank 0 passes a state, and the other ranks pass None. Rank 0 sends the values
        in chunks of 16 MiB; each rank keeps its shards. Otherwise each rank passes the
        same state.

    Returns missing and unexpected keys, like nn.Module.load_state_dict(). Load hooks and
    `_load_from_state_dict` of modules run before anything is copied. With from_rank0 they see
    names, shapes and dtypes, and may rename, drop or replace entries; asking for values is an
    error. Extra state and post hooks come last, after `strict` is applied.

    Raises, on all ranks: RuntimeError listing everything that does not fit; ValueError if the model
    has no sharded modules, or if a rank other than 0 passes a state with from_rank0; TypeError if
    the state is not a dict of tensors; DivergenceError if ranks would load different tensors.
    """
    comm = comm_of(model)
    given = {} if state is None else state
    with on_all_ranks(comm):
        if from_rank0 and comm.rank != 0 and len(given) > 0:
            raise ValueError(
                f"load_state_dict(from_rank0=True) got a state on rank {comm.rank}: pass None on "
                "all ranks but 0"
            )
        _check_state(given if not from_rank0 or comm.rank == 0 else {})
    if from_rank0:
        source = FromRank0(comm)
        outline = OrderedDict(pending(given, source))
        outline._metadata = getattr(given, "_metadata", None)  # type: ignore[attr-defined]
        given = source.outline(outline)
    with on_all_ranks(comm, lambda: todo.fact()):
        todo, keys = plan(model, given, strict)
    with on_all_ranks(comm):
        todo.carry_out()
    return keys


def _check_state(state: object) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state must be a mapping from names to tensors, got {type(state).__name__}"
        )
    for name, value in state.items():
        if not isinstance(name, str):
            raise TypeError(f"state dict keys must be strings, got {name!r}")
        if not isinstance(value, Tensor):
            continue
        if type(value) not in (Tensor, nn.Parameter, nn.Buffer) or value.layout != torch.strided:
            what = f"a {type(value).__name__} of layout {value.layout}"
            raise TypeError(
                f"'{name}' in the state dict must be a plain strided tensor, got {what}: "
                "convert it (DTensor.full_tensor(), Tensor.to_dense())"
            )
        if value.is_meta:
            raise TypeError(
                f"'{name}' in the state dict is on the meta device and has no values: take the "
                "state dict of a model that has some"
            )


# --- plans ----------------------------------------------------------------------------------------


def comm_of(model: nn.Module) -> _core.Comm:
    """Return the ranks that the units of `model` span. Raise ValueError if there is no unit, or if
    units span different ranks."""
    comms = [state.comms.all for _, state in units_of(model)]
    if not comms:
        raise ValueError(
            f"this {type(model).__name__} has no sharded modules: call FSDP(model) first, or use "
            "model.load_state_dict()"
        )
    if any(comm is not comms[0] for comm in comms):
        raise ValueError(
            "the units of the model span different ranks: save and load each of them on its own"
        )
    return comms[0]


def plan(model: nn.Module, state: Mapping[str, Any], strict: bool) -> tuple[LoadPlan, Any]:
    """Return what model.load_state_dict(state) would do, and its result; change nothing. Raise
    RuntimeError, which lists everything that does not fit."""
    refuse((each for _, each in units_of(model)), "load", PASS)
    todo = LoadPlan()
    token = planned.set(todo)
    with _Recorder(model) as recorder, _Later(model) as later:
        error, keys = None, None
        try:
            keys = model.load_state_dict(state, strict=strict)
        except RuntimeError as caught:
            if not recorder.wrong:
                raise
            error = caught
        finally:
            planned.reset(token)
    if recorder.wrong:
        head = str(error or f"Error(s) in loading state_dict for {type(model).__name__}:")
        raise RuntimeError("\n\t".join([head, *recorder.wrong]))
    todo.copies, todo.calls = list(recorder.copies.values()), later.calls(keys)
    return todo, keys


class _Recorder(TorchFunctionMode):
    """Records copies to a model's tensors, instead of executing them, and dtypes that misfit."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        named = (*model.named_parameters(), *model.named_buffers())
        self._names = {id(tensor): name for name, tensor in named}
        self.copies: dict[int, Copy] = {}
        self.wrong: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not Tensor.copy_ or id(args[0]) not in self._names:
            return func(*args, **(kwargs or {}))
        target, value = args[:2]
        if _kind(value.dtype) != _kind(target.dtype):
            self.wrong.append(
                f"dtype mismatch for {self._names[id(target)]}: cannot cast {value.dtype} from "
                f"checkpoint to {target.dtype} in current model."
            )
        self.copies.pop(id(target), None)  # tied: the last one counts, as in nn.Module
        self.copies[id(target)] = Copy(to_local(target).detach(), to_local(value))
        return target


def _kind(dtype: torch.dtype) -> str:
    return "floating" if dtype.is_floating_point else "complex" if dtype.is_complex else "whole"


class _Later(contextlib.AbstractContextManager["_Later"]):
    """Delays set_extra_state() and load post hooks of the modules of `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._own = [
            {key: vars(m)[key] for key in (_SETTER, _HOOKS) if key in vars(m)}
            for m in self._modules
        ]
        self._extra: list[Callable[[], Any]] = []

    def __enter__(self) -> _Later:
        for module in self._modules:
            if type(module).set_extra_state is not nn.Module.set_extra_state:
                vars(module)[_SETTER] = functools.partial(self._keep, module)
            if module._load_state_dict_post_hooks:
                vars(module)[_HOOKS] = {}
        return self

    def __exit__(self, *_: object) -> None:
        for module, own in zip(self._modules, self._own, strict=True):
            vars(module).pop(_SETTER, None)
            vars(module).update(own)

    def _keep(self, module: nn.Module, state: object) -> None:
        self._extra.append(lambda: type(module).set_extra_state(module, state))

    def calls(self, keys: object) -> list[Callable[[], Any]]:
        """Return the delayed calls, given the result of load_state_dict()."""
        modules = reversed(list(zip(self._modules, self._own, strict=True)))
        return self._extra + [
            functools.partial(hook, module, keys)
            for module, own in modules
            for hook in own[_HOOKS].values()
        ]


def note_loads(loads: Iterable[NotedLoad]) -> None:
    """Report to the models what has been loaded, since ranks that load alone are an error."""
    todo = planned.get()
    if todo is not None:
        todo.loads += loads
        return
    for unit, index, content in loads:
        unit.note_load(index, content)


def content_of(value: Tensor) -> int:
    """Return a number that is the same on ranks that load the same, from a few elements."""
    if type(value) not in (Tensor, nn.Parameter) or value.numel() == 0 or value.is_meta:
        return 0
    flat = value.detach().reshape(-1)
    some = flat[:: -(-flat.numel() // _SAMPLES)].tolist()
    return zlib.crc32(repr((some, tuple(value.shape))).encode())
