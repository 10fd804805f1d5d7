"""Before and after each optimizer's step: what its models must know, and what it must not find.

Torch runs two hooks around the step of every optimizer. They tell the models, as a
step that one rank leaves out is an error, and refuse gradients that are not reduced and parameters
that unshard() has gathered.

Whether an optimizer is right on shards is judged by what it does: its operations are guarded
(guard/slices.py). Only those of libraries whose steps run in kernels of their own, which the guard
cannot see, are refused by name.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from zshard import _core
from zshard._errors import ShardError
from zshard.guard.outside import check_optimizer
from zshard.guard.slices import guarded, plain
from zshard.optim.announce import say_step
from zshard.optim.earlier_state import shard_state_of
from zshard.optim.replicas import note_values
from zshard.optim.sharded_state import SCALARS
from zshard.optim.step_digest import note_step
from zshard.units.shards import stepped_by, units_stepped_by

__all__ = [
    "before_first_steps",
    "install",
    "install_steps",
    "know",
    "seen_optimizers",
    "shard_earlier_state",
]


_KERNELS = frozenset(("apex", "bitsandbytes", "deepspeed", "fbgemm_gpu", "transformer_engine"))
"""Packages whose optimizers step in kernels of their own."""

_NEED_NORMS = ("lamb", "lars", "novograd")
"""Which of those need norms of whole parameters: words in the class's name, in lower case."""

_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, None] = weakref.WeakKeyDictionary()
_inner: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Those that another one calls on the ranks that have something for them to step."""

# The compiler would trace what it cannot.
_note_step = torch._disable_dynamo(note_step)  # type: ignore[attr-defined]
_handles: list[RemovableHandle] = []


_ELEMENTWISE = (
    *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
"""Classes of torch.optim whose step is elementwise: test_optim_guard.py holds them to it."""


def install() -> None:
    """Start watching the steps of all optimizers. Idempotent."""
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))
        _handles.append(register_optimizer_step_post_hook(_after_step))


_checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_checks: list[Callable[[torch.optim.Optimizer], bool]] = []


def install_steps() -> None:
    """Have steps that are known to be elementwise run as on plain tensors: asking about each of
    their operations would take as long as the operations. Torch wraps the step of a class when its
    first optimizer is constructed; of classes that have some, the inner function is replaced."""
    wrap = torch.optim.Optimizer.profile_hook_step

    @functools.wraps(wrap)
    def wrap_plain(step: Callable[..., Any]) -> Callable[..., Any]:
        of_torch = step.__module__.startswith("torch.optim.")
        is_elementwise = of_torch and step.__qualname__.partition(".")[0] in _ELEMENTWISE
        return wrap(_plainly(step) if is_elementwise else step)

    torch.optim.Optimizer.profile_hook_step = staticmethod(wrap_plain)  # type: ignore[method-assign,assignment]
    for name in _ELEMENTWISE:
        step: Any = getattr(torch.optim, name).step
        for cell in step.__closure__ if getattr(step, "hooked", False) else ():
            if cell.cell_contents is step.__wrapped__:
                cell.cell_contents = _plainly(step.__wrapped__)


def before_first_steps(check: Callable[[torch.optim.Optimizer], bool]) -> None:
    """Call `check` before the first step of each optimizer, until it returns False."""
    _checks.append(check)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _check_first_step(optimizer: torch.optim.Optimizer) -> None:
    _checks[:] = [check for check in _checks if check(optimizer)]


def know(optimizer: torch.optim.Optimizer) -> None:
    """Count an optimizer as seen even if its step() is never called. One that is older than its
    model may have full state."""
    shard_earlier_state(optimizer)
    _seen[optimizer] = None
    for each in stepped_by(optimizer):
        if each.peers is not None:
            each.peers.book.note(optimizer)


def shard_earlier_state(optimizer: torch.optim.Optimizer) -> None:
    """Shard the full state of an optimizer that is older than its model and has not been seen."""
    if optimizer not in _seen:
        shard_state_of(optimizer)


def seen_optimizers() -> list[torch.optim.Optimizer]:
    """Return all living optimizers that have stepped, that step in backward, or that have loaded
    state, in the order in which they did so first."""
    return list(_seen)


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Torch's pre-hook. Raises RuntimeError for gradients that have not been reduced, and for
    parameters that unshard() has gathered: with a closure, which makes the gradients, after it."""
    if optimizer not in _checked:
        _check_first_step(optimizer)
        _checked.add(optimizer)
    know(optimizer)
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        check_optimizer(optimizer)
        _inner.add(getattr(optimizer, "optim", optimizer))
    if _needs_unseen_norms(type(optimizer)) and _holds_shards(optimizer):
        raise ShardError(
            f"{type(optimizer).__name__} scales updates by norms of whole parameters, but would "
            "see shards. Use an elementwise optimizer (zshard.AdamW, torch.optim.SGD, ...), or "
            'FSDP(..., strategy="no_shard")'
        )
    if isinstance(optimizer, torch.optim.SparseAdam) and stepped_by(optimizer):
        raise NotImplementedError(
            "SparseAdam needs sparse gradients, but zshard's are dense, also of "
            "nn.Embedding(sparse=True) and under no_shard: use torch.optim.Adagrad or SGD, which "
            "leave rows without a gradient as they are, too"
        )
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        _begin_to_write(optimizer)
        return None
    for unit in units_stepped_by(optimizer):  # an optimizer may write before its closure, too
        unit.engine.begin_write()
    checked = _checked_after(optimizer, closure)
    if len(args) > 1:
        return (args[0], checked, *args[2:]), kwargs
    return args, {**kwargs, "closure": checked}


def _checked_after(
    optimizer: torch.optim.Optimizer, closure: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(closure)
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = closure(*args, **kwargs)
        _begin_to_write(optimizer)
        return result

    return checked


def _begin_to_write(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what must not be, and tell the models that their parameters are to be written."""
    if optimizer not in _inner:
        say_step(optimizer)
    if _core.has_local_grads():
        _refuse_local_grads(optimizer)
    if _core.has_held_units():
        _refuse_held_units(optimizer)
    note_values(stepped_by(optimizer))
    for unit in units_stepped_by(optimizer):
        unit.engine.before_step()


def _after_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Torch's post-hook, which it runs only if the step has not raised."""
    try:
        if optimizer not in _inner:
            _note_step(optimizer)
        know(optimizer)  # it has its state now
    finally:
        for unit in units_stepped_by(optimizer):
            unit.engine.end_write()


def _refuse_local_grads(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                _core.grad_owner(param.grad)  # which refuses them


def _refuse_held_units(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            name = _core.held_unit(param)
            if name is not None:
                raise RuntimeError(
                    f"unit '{name or '(root)'}' is unsharded by unshard() or summon_full_params(), "
                    "so its parameters are copies and the update would be lost: call reshard() on "
                    "its module, or leave the context, before the optimizer's step"
                )


def _plainly(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def stepped(
        self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any:
        known = len(self.state)
        with plain(), _with_foreach(self):
            result = step(self, None if closure is None else guarded(closure), **kwargs)
        if len(self.state) != known:
            _guard_state(self)
        return result

    # The compiler would trace through classes that ask about operations, which it cannot.
    return torch._disable_dynamo(stepped)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _with_foreach(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context manager in which an optimizer steps shards on GPUs by operations on lists, where it
    would do so with torch's own classes."""
    groups = [group for group in optimizer.param_groups if _takes_foreach(group)]
    for group in groups:
        group["foreach"] = True
    try:
        yield
    finally:
        for group in groups:
            group["foreach"] = None


def _takes_foreach(group: dict[str, Any]) -> bool:
    if group.get("foreach", False) is not None or group.get("fused") or group.get("differentiable"):
        return False
    if isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable"):
        return False
    params = group["params"]
    return all(param.is_cuda for param in params) and any(map(_core.is_shard, params))


def _guard_state(optimizer: torch.optim.Optimizer) -> None:
    """State that was made within plain() is guarded as its parameter is."""
    for param, entries in optimizer.state.items():
        part = _core.slice_part(param)
        for key, value in entries.items() if part is not None else ():
            is_number = value.dim() == 0 and key in SCALARS if torch.is_tensor(value) else True
            if not is_number and value.dim() == param.dim():
                _core.mark_slice(value, part)


def _needs_unseen_norms(cls: type) -> bool:
    if cls.__module__.partition(".")[0] not in _KERNELS:
        return False
    return any(word in cls.__name__.lower() for word in _NEED_NORMS)


def _holds_shards(optimizer: torch.optim.Optimizer) -> bool:
    return any(_core.is_shard(p) for group in optimizer.param_groups for p in group["params"])
