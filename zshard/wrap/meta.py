"""Models on the meta device: each unit is materialized just before it is sharded.

Modules get memory and values one after another in the order in which their constructors ran,
children before the module that contains them, so that they draw the same random numbers as in the
plain model. Only modules up to the unit that is sharded next get them, so that little is unsharded
at a time. Before a module is initialized, its tensors are filled with a mark. A tensor that still
has the mark afterwards was forgotten and would train on garbage: an error, at once or in the unit's
first forward, as scripts for FSDP2 and DeepSpeed initialize or load after sharding.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from zshard.guard.slices import to_local
from zshard.ranks.agreement import PublicCall
from zshard.units.units import is_unit, like, state_of

Init = Callable[[nn.Module], Any]

_LEAST = 2**18  # bytes; smaller tensors are malloc's
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def uninitialized(module: nn.Module) -> None:
    """Leave the parameters and buffers of a model on the meta device uninitialized (NaN).

    Pass it as FSDP(model, param_init_fn=zshard.uninitialized) if all values will come from a
    checkpoint (zshard.load) or a state dict. Non-persistent buffers, which neither of them
    contains, are initialized by the model's `_init_weights`, as Hugging Face's models have it; FSDP
    raises ValueError for one that is not.
    """


def reset_or_leave(module: nn.Module) -> None:
    """Initialize a module as FSDP() does by default, but skip modules without an initialization.

    fully_shard passes this: scripts for FSDP2 initialize the model afterwards. A tensor that they
    omit is an error in the first forward.
    """


_drawn: list[Tensor] = []
"""The CPU generator's states before and after the last draw for models on the meta device."""


def rewind() -> None:
    """Take back the random numbers that were drawn for models on the meta device, unless more were
    drawn since: a script that initializes now draws what a plain model would."""
    if _drawn and torch.equal(torch.get_rng_state(), _drawn[1]):
        torch.set_rng_state(_drawn[0])
    _drawn.clear()


class Materializer:
    """Materializes the modules of a model that are on the meta device.

    init: called with each module that has parameters or buffers of its own there; None: the
    module's reset_parameters. left_out: with reset_or_leave(), the tensors that have no values yet,
    as (module, attribute, dotted name).
    """

    def __init__(self, root: nn.Module, init: Init | None, ignored: set[nn.Module]) -> None:
        self._init = None if init is reset_or_leave else init
        self._leaves = init is reset_or_leave
        self.left_out: list[tuple[nn.Module, str, str]] = []
        self._names = {id(module): name for name, module in root.named_modules()}
        self._queue = list(_children_first(root, ignored, set()))
        self._place = {id(module): place for place, module in enumerate(self._queue)}
        self._done = 0
        self._around = _initializing(root, None)
        self._areas = MemoryCache()
        self._given: set[int] = set()  # parameters that were materialized here

    def up_to(self, module: nn.Module) -> None:
        """Materialize `module`, the modules below it, and those constructed before it. Raises
        ValueError, which names the tensor, if an initialization omits one."""
        last = self._place[id(module)]
        before = torch.get_rng_state()
        while self._done <= last:
            self._materialize(self._queue[self._done])
            self._done += 1
        after = torch.get_rng_state()
        if not torch.equal(before, after):  # consecutive models count as one draw
            continues = bool(_drawn) and torch.equal(before, _drawn[1])
            _drawn[:] = _drawn[0] if continues else before, after

    def _materialize(self, module: nn.Module) -> None:
        params = {k: p for k, p in module._parameters.items() if p is not None and p.is_meta}
        buffers = {k: b for k, b in module._buffers.items() if b is not None and b.is_meta}
        tied = [p for p in module._parameters.values() if id(p) in self._given]
        if not params and not buffers and not tied:
            # A model's `_init_weights` may be for the layers in a module.
            around = self._around.get(id(module))
            is_given = any(id(param) in self._given for param in module.parameters())
            if self._init is None and around is not None and is_given:
                with torch.no_grad():
                    around(module)
            return
        before = [(p, p.detach().clone()) for p in tied if p is not None]
        for param in params.values():  # each stays the same object for all its holders
            real = like(param, self._areas.empty_like(param).fill_(_mark_of(param)))
            torch.utils.swap_tensors(param, real)  # type: ignore[no-untyped-call]
            self._given.add(id(param))
        for name, buffer in buffers.items():
            mark = _mark_of(buffer)
            module._buffers[name] = torch.full_like(buffer, mark, device="cpu", requires_grad=False)
        marked = {name: getattr(module, name).data_ptr() for name in (*params, *buffers)}
        if self._init is uninitialized:
            self._initialise_unsaved(module, module._non_persistent_buffers_set & buffers.keys())
            return
        self._initialise(module, list(marked))
        if self._init is not None and _is_untouched(module, marked):
            self._initialise_on_meta(module, list(marked))
            marked = {}  # its memory is elsewhere, and its content does not matter
        for param, value in before:  # drawn for this module as well, then tied to another's
            param.data.copy_(value)
        for name, place in marked.items():
            tensor = getattr(module, name)  # elsewhere: to_empty(), for rank 0's values
            if tensor.data_ptr() != place or not has_mark(tensor):
                continue
            if not self._leaves:
                raise ValueError(self._complaint(module, name, "does not initialize it"))
            self.left_out.append((module, name, self._path(module, name)))

    def _initialise_unsaved(self, module: nn.Module, names: Set[str]) -> None:
        """Initialize buffers that no checkpoint has, as rotary frequencies, by the `_init_weights`
        of the model around their module."""
        around = self._around.get(id(module))
        if names and around is not None:
            own = {**module._parameters, **module._buffers}.items()
            others = [(t, t.detach().clone()) for k, t in own if t is not None and k not in names]
            with torch.no_grad():
                around(module)
            for tensor, before in others:  # given values already, or still to be loaded
                tensor.data.copy_(before)
        for name in names:
            value = getattr(module, name)
            unset = not value.any() if value.dtype == torch.bool else has_mark(value)
            if around is None or unset:
                what = "leaves it uninitialized, but no state dict contains it"
                raise ValueError(self._complaint(module, name, what))

    def _initialise_on_meta(self, module: nn.Module, names: Sequence[str]) -> None:
        """Initialize a module that is on the meta device again: FSDP1's way, where the function
        itself allocates memory. Its parameters stay the same objects."""
        params = {k: p for k, p in module._parameters.items() if k in names and p is not None}
        for param in params.values():
            on_meta = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
            vars(on_meta).update(vars(param))
            torch.utils.swap_tensors(param, on_meta)  # type: ignore[no-untyped-call]
        for name in set(names) - params.keys():
            module._buffers[name] = torch.empty_like(getattr(module, name), device="meta")
        self._initialise(module, names)
        for name, param in params.items():
            new = module._parameters[name]
            if new is not None and new is not param:  # of to_empty()
                torch.utils.swap_tensors(param, new)  # type: ignore[no-untyped-call]
                module._parameters[name] = param
        for name in names:
            if getattr(module, name).is_meta:
                raise ValueError(self._complaint(module, name, "does not initialize it"))

    def _initialise(self, module: nn.Module, names: Sequence[str]) -> None:
        reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        around = self._around.get(id(module))
        with torch.no_grad():
            if self._init is not None:
                self._init(module)
            elif reset is not None or around is not None:
                if reset is not None:
                    reset()
                if around is not None:
                    around(module)
            elif names and not self._leaves:  # otherwise all its tensors are tied to another's
                raise ValueError(self._complaint(module, names[0], "has no reset_parameters()"))

    def _path(self, module: nn.Module, name: str) -> str:
        return ".".join(part for part in (self._names.get(id(module), ""), name) if part)

    def _complaint(self, module: nn.Module, name: str, what: str) -> str:
        path = self._path(module, name)
        how = "param_init_fn" if self._init is not None else type(module).__name__
        return (
            f"{path!r} is on the meta device, and {how} {what}: pass FSDP(param_init_fn=...) a "
            "function that initializes all tensors of the module that it gets"
        )


def _children_first(
    module: nn.Module, ignored: set[nn.Module], seen: set[int]
) -> Iterator[nn.Module]:
    """Yield the modules in construction order, without units of earlier calls."""
    seen.add(id(module))
    for child in module._modules.values():
        if child is None or id(child) in seen or child in ignored or is_unit(child):
            continue
        yield from _children_first(child, ignored, seen)
    yield module


def _initializing(module: nn.Module, around: Init | None) -> dict[int, Init]:
    """Return what initializes each module, by id(): the `_init_weights` of the nearest enclosing
    model, if it takes a module."""
    init = getattr(module, "_init_weights", None)
    try:
        inspect.signature(init).bind(None)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # None, or it does not take a module
        init = around
    by_id = {} if init is None else {id(module): init}
    for child in module._modules.values():
        by_id.update({} if child is None else _initializing(child, init))
    return by_id


def _mark_of(tensor: Tensor) -> float | int:
    if tensor.is_floating_point() or tensor.is_complex():
        return float("nan")
    if tensor.dtype == torch.bool:
        return 0
    info = torch.iinfo(tensor.dtype)
    return info.min or info.max  # zeros are a common value


def has_mark(tensor: Tensor) -> bool:
    """Return whether the mark is everywhere. A bool has no spare value to serve as a mark."""
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return False
    first = tensor[(0,) * tensor.dim()]  # most tensors differ there, which settles it
    return _is_mark(first) and _is_mark(tensor)


def _is_untouched(module: nn.Module, marked: dict[str, int]) -> bool:
    """Return whether an initialization, as one that looks for the meta device, has changed none of
    these tensors. marked: where their memory is."""
    tensors = {name: getattr(module, name) for name in marked}
    return bool(tensors) and all(
        each.data_ptr() == marked[name]
        and (not each.any() if each.dtype == torch.bool else each.numel() == 0 or has_mark(each))
        for name, each in tensors.items()
    )


def _is_mark(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return bool((tensor == _mark_of(tensor)).all())


# --- tensors without values -----------------------------------------------------------------------


def check_in_forward(module: nn.Module, left_out: list[tuple[nn.Module, str, str]]) -> None:
    """Make the first forward of a unit's module raise RuntimeError for a tensor without values.
    left_out: as Materializer has it."""
    if not left_out:
        return
    rest = [(weakref.ref(owner), attribute, name) for owner, attribute, name in left_out]
    checked = False  # on this rank, in a forward that it may have run alone

    def check(model: nn.Module, __: object) -> None:
        nonlocal checked
        if checked and not torch.is_grad_enabled():
            return
        tensors = (getattr(owner(), attribute, None) for owner, attribute, _ in rest)
        unset = (
            i
            for i, each in enumerate(tensors)
            if isinstance(each, Tensor) and (each.is_meta or has_mark(to_local(each.detach())))
        )
        with torch.no_grad():
            first = next(unset, len(rest))
        if torch.is_grad_enabled():  # all ranks run it, and some may have no elements of a tensor
            with PublicCall("forward()"):
                all_first = state_of(model).comms.all.exchange(first.to_bytes(4, "big"))
            first = min(int.from_bytes(each, "big") for each in all_first)
        if first < len(rest):
            raise RuntimeError(
                f"{rest[first][2]!r} was on the meta device, and nothing has initialized it: do so "
                "or load a state dict, on all ranks, before the first forward"
            )
        checked = True
        if torch.is_grad_enabled():  # else the other ranks still wait for this one there
            handle.remove()

    handle = module.register_forward_pre_hook(check, prepend=True)
    state_of(module).note_hooks(module, [handle])


class MemoryCache:
    """Memory of short-lived tensors. What one has freed goes to the next of its size as it is: the
    kernel need not zero its pages again, and malloc, which would fragment it, never sees it."""

    def __init__(self) -> None:
        self._free: dict[int, list[mmap.mmap]] = {}

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return an uninitialized CPU tensor of that shape and dtype, contiguous if large."""
        numel = math.prod(tensor.shape)
        size = numel * tensor.element_size()
        if size < _LEAST:
            return torch.empty_like(tensor, device="cpu", requires_grad=False)
        same = self._free.setdefault(size, [])
        for areas in () if same else self._free.values():
            areas.clear()  # another shape follows: what the last has left would only be held
        area = same.pop() if same else mmap.mmap(-1, size, flags=_PRIVATE)
        # The storage holds `bytes_`; its end is the storage's.
        bytes_ = (ctypes.c_char * size).from_buffer(area)
        weakref.finalize(bytes_, same.append, area).atexit = False
        flat = torch.frombuffer(bytes_, dtype=tensor.dtype, count=numel)
        return flat.view(tensor.shape)
