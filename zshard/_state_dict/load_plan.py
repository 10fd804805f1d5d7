"""Load in two steps: first check everything, then read values one chunk at a time.

The one idea: nn.Module loads as always, with its hooks and errors, but it gets pending tensors, and
its copies are recorded instead of done. The result is a plan, which lists each of this rank's
shards with the tensor to read it from. Once all ranks have a plan, values are read into place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zshard import _core
from zshard._guard.slices import to_local
from zshard._ranks.agreement import on_all_ranks
from zshard._state_dict.module import Load, note_loads, planned_loads, writing
from zshard._state_dict.stand_ins import Pending
from zshard._units.units import units_of

CHUNK = 2**24  # bytes


class Source(Protocol):
    """A source of values."""

    def read(self, name: str, begin: int, target: Tensor) -> None:
        """Fill `target` with row-major elements of the tensor `name` from `begin` on, cast to its
        dtype. All ranks call it for the same names in the same order."""


class Copy(NamedTuple):
    """A tensor of the model, and the value to load into it."""

    target: Tensor
    value: Tensor


class LoadPlan(NamedTuple):
    """What loading will do: copies, then calls; and the keys that nn.Module returns."""

    copies: list[Copy]
    calls: list[Callable[[], Any]]
    keys: Any
    loads: list[Load]

    def fact(self) -> list[tuple[str, Any]]:
        """The facts that must agree between ranks."""
        return [
            (copy.value.label, copy.value.dtype)
            for copy in self.copies
            if isinstance(copy.value, Pending)
        ]


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


def stream(
    model: nn.Module,
    state: Mapping[str, Any],
    strict: bool,
    source: Source | None,
    comm: _core.Comm,
) -> Any:
    """Load `state`, whose Pending tensors come from `source`, into `model`. Collective.

    Returns what nn.Module.load_state_dict() returns. Raises, on all ranks, RuntimeError for what
    does not fit, before the model changes; and errors of reading, after which the model may be
    partly loaded.
    """
    made: list[LoadPlan] = []
    with on_all_ranks(comm, lambda: made[0].fact()):
        made.append(plan(model, state, strict))
    with on_all_ranks(comm):
        carry_out(made[0], source)
    return made[0].keys


def carry_out(plan: LoadPlan, source: Source | None) -> None:
    """Execute the plan."""
    with torch.no_grad(), writing(unit for unit, _, _ in plan.loads):
        for copy in plan.copies:
            _perform(copy, source)
        for call in plan.calls:
            call()
        # All ranks carry out the same plan, and some of them know no contents.
        note_loads([(unit, index, 0) for unit, index, _ in plan.loads])


def plan(model: nn.Module, state: Mapping[str, Any], strict: bool) -> LoadPlan:
    """Return what model.load_state_dict(state) would do; change nothing. Raise RuntimeError, which
    lists everything that does not fit."""
    loads: list[Load] = []
    token = planned_loads.set(loads)
    with _Recorder(model) as recorder, _later(model) as calls:
        error, keys = None, None
        try:
            keys = model.load_state_dict(state, strict=strict)
        except RuntimeError as caught:
            if not recorder.wrong:
                raise
            error = caught
        finally:
            planned_loads.reset(token)
    if recorder.wrong:
        head = str(error or f"Error(s) in loading state_dict for {type(model).__name__}:")
        raise RuntimeError("\n\t".join([head, *recorder.wrong]))
    return LoadPlan(list(recorder.copies.values()), calls(keys), keys, loads)


def _perform(copy: Copy, source: Source | None) -> None:
    if isinstance(copy.value, Pending):
        assert source is not None, "only a source makes them"
        source.read(copy.value.label, copy.value.begin, copy.target)
    else:
        copy.target.copy_(copy.value)


class _Recorder(TorchFunctionMode):
    """Context that records copies to the tensors of a model instead of doing them, and copies that
    would change the kind of dtype."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        named = (*model.named_parameters(), *model.named_buffers())
        self._names = {id(tensor): name for name, tensor in named}
        self.copies: dict[int, Copy] = {}
        self.wrong: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.copy_ or id(args[0]) not in self._names:
            return func(*args, **(kwargs or {}))
        target, value = args[:2]
        if _kind(value.dtype) != _kind(target.dtype):
            self.wrong.append(
                f"dtype mismatch for {self._names[id(target)]}: cannot cast {value.dtype} from "
                f"checkpoint to {target.dtype} in current model."
            )
        self.copies.pop(id(target), None)  # tied: the last one counts, as for nn.Module
        self.copies[id(target)] = Copy(to_local(target).detach(), to_local(value))
        return target


def _kind(dtype: torch.dtype) -> str:
    return "floating" if dtype.is_floating_point else "complex" if dtype.is_complex else "whole"


@contextlib.contextmanager
def _later(model: nn.Module) -> Iterator[Callable[[Any], list[Callable[[], Any]]]]:
    """Context that delays set_extra_state() and load post hooks of the modules of `model`. Yields a
    function that turns the result of load_state_dict() into the delayed calls."""
    extra: list[Callable[[], Any]] = []
    hooks: list[tuple[nn.Module, dict[int, Any]]] = []

    def keep(module: nn.Module, state: Any) -> None:
        extra.append(lambda: type(module).set_extra_state(module, state))

    def calls(keys: Any) -> list[Callable[[], Any]]:
        posts = [
            lambda hook=hook, module=module: hook(module, keys)
            for module, table in reversed(hooks)
            for hook in table.values()
        ]
        return extra + posts

    changed = []
    for module in model.modules():
        own = vars(module)
        changed.append((own, own.get("set_extra_state"), own["_load_state_dict_post_hooks"]))
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            own["set_extra_state"] = lambda state, module=module: keep(module, state)
        if module._load_state_dict_post_hooks:
            hooks.append((module, module._load_state_dict_post_hooks))
            own["_load_state_dict_post_hooks"] = {}
    try:
        yield calls
    finally:
        for own, setter, table in changed:
            own.pop("set_extra_state", None)
            if setter is not None:
                own["set_extra_state"] = setter
            own["_load_state_dict_post_hooks"] = table


@contextlib.contextmanager
def flat_of(target: Tensor) -> Iterator[Tensor]:
    """Yield a 1-dimensional view of a tensor to write to; without such a view, a temporary tensor
    that is copied to `target` at the end."""
    target = to_local(target)
    if target.is_contiguous():
        yield target.view(-1)
        return
    flat = torch.empty(target.numel(), dtype=target.dtype, device=target.device)
    yield flat
    target.copy_(flat.view(target.shape))


def chunks(numel: int, dtype: torch.dtype) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of all elements, in pieces of at most CHUNK bytes."""
    step = CHUNK // dtype.itemsize
    for begin in range(0, numel, step):
        yield begin, min(begin + step, numel)
