"""Hooks around each optimizer's step: they notify its models, and refuse what would go wrong.

Torch runs two hooks around the step of every optimizer. They notify the models, since a step that
one rank leaves out is an error, and refuse gradients that are not reduced and parameters that
unshard() has gathered. Here zshard also first sees an optimizer that is older than its sharded
model.

Whether an optimizer is correct on shards depends on its operations, which are guarded. The top of
this file lists the known classes: torch's elementwise ones, which need no guard, and those of
libraries whose steps run in kernels of their own, which the guard cannot see.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zshard import _core
from zshard._errors import ShardError
from zshard.guard.outside import check_zero_redundancy
from zshard.guard.slices import guarded, plain
from zshard.optim.sharded_state import SCALARS, entries_of, params_of, shard_state_of
from zshard.optim.step_digest import note_step, note_values
from zshard.units import returned
from zshard.units.extensions import EXTENSIONS, refuse_writes
from zshard.units.moment import REPLACED, UNSHARDED, refuse
from zshard.units.shards import (
    OptimizerContext,
    context_of,
    contexts,
    part_of,
    states_stepped_by,
    stepped_by,
    units_stepped_by,
)

_ELEMENTWISE = (
    *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
"""Classes of torch.optim whose step is elementwise: test_optim_guard.py holds them to it."""

_KERNELS = frozenset(("apex", "bitsandbytes", "deepspeed", "fbgemm_gpu", "transformer_engine"))
"""Packages whose optimizers step in kernels of their own."""

_NEED_NORMS = ("lamb", "lars", "novograd")
"""Of those, optimizers that need norms of whole parameters: lower-case words in the class name."""


_QUANTIZE = frozenset(("bitsandbytes", "torchao"))
"""Packages with optimizers that quantize their state."""


def install() -> None:
    """Start watching the steps of all optimizers."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


# --- known optimizers -----------------------------------------------------------------------------


@torch._disable_dynamo  # type: ignore[attr-defined]
def _check_first_step(optimizer: Optimizer) -> None:
    for state in states_stepped_by(optimizer):
        if state.model.first_step is not None:
            state.model.first_step(optimizer)
    context_of(optimizer).is_checked = True


@torch._disable_dynamo  # type: ignore[attr-defined]
def know(optimizer: Optimizer, in_step: bool = False, is_loaded: bool = False) -> None:
    """Count an optimizer as seen even if its step() is never called. If it is older than one of its
    sharded models, it may have full state; then this rank keeps its shard of that: call this only
    where all ranks do. Peers that share memory can read its state from now on. in_step: around a
    step, when nothing else has changed it. is_loaded: all of its state has just been loaded."""
    models, older = stepped_by(optimizer), False
    context = context_of(optimizer)
    if context.seen is not models:
        older = is_older(optimizer)
        if older and not is_loaded:
            shard_state_of(optimizer)
        context.seen = models
    post(optimizer, in_step, older)


def is_older(optimizer: Optimizer) -> bool:
    """Return whether one of its models was sharded after know() last saw it. Not if only other
    models are new: a kept run's state must stay where it is."""
    models, context = stepped_by(optimizer), context_of(optimizer)
    return [each.facts for each in context.seen or ()] != [each.facts for each in models]


def post(optimizer: Optimizer, in_step: bool = False, is_new: bool = False) -> None:
    """Let peers that share memory read an optimizer's state as it is. in_step: as in know().
    is_new: it may have been sharded since the last call."""
    context = context_of(optimizer)
    context.seen = context.seen or []
    for each in stepped_by(optimizer):
        if each.peers is not None:
            each.peers.note(optimizer, in_step, is_new)


def know_again(unit: _core.Unit) -> None:
    """Call know() for the optimizers that had sharded state of parts of a model before FSDP()
    wrapped the model itself, `unit`."""
    for optimizer in [each for each, context in contexts.items() if context.seen]:
        if any(each.engine_id == unit.engine_id for each in units_stepped_by(optimizer)):
            know(optimizer)


def seen_optimizers() -> list[Optimizer]:
    """Return all living optimizers that have stepped, saved or loaded, in order of first use."""
    return [each for each, context in contexts.items() if context.seen is not None]


# --- hooks around a step --------------------------------------------------------------------------


def _step_around(optimizer: Optimizer) -> OptimizerContext | None:
    """Return the optimizer whose step() calls this one's, of the same models."""
    around = [(each, context) for each, context in contexts.items() if context.is_open]
    engines = {unit.engine for unit in units_stepped_by(optimizer)} if around else set()
    for each, context in around:
        if engines and engines <= {unit.engine for unit in units_stepped_by(each)}:
            return context
    return None


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Torch's pre-hook. Raises RuntimeError for gradients that have not been reduced, and for
    parameters that unshard() has gathered. With a closure, which computes the gradients, the check
    runs after it."""
    context = context_of(optimizer)
    context.depth += 1
    if context.depth == 1:
        context.outer = _step_around(optimizer)
        context.is_open, context.has_begun = True, False
        refuse_writes(units_stepped_by(optimizer), "a step", optimizer)
        if returned.known:
            returned.look()
        know(optimizer, in_step=True)
        _refuse_by_class(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        if not context.has_begun:
            _begin_to_write(optimizer, in_closure=context.depth > 1)
        return None
    for unit in units_stepped_by(optimizer):  # an optimizer may also write before its closure
        unit.engine.begin_write()

    @functools.wraps(closure)
    def checked(*args: object, **kwargs: object) -> Any:
        result = closure(*args, **kwargs)
        _begin_to_write(optimizer, in_closure=True)
        return result

    if len(args) > 1:
        return (args[0], checked, *args[2:]), kwargs
    return args, {**kwargs, "closure": checked}


def _begin_to_write(optimizer: Optimizer, in_closure: bool = False) -> None:
    """Refuse invalid gradients, and notify the models that they are about to be written."""
    context = context_of(optimizer)
    if context.outer is not None and context.outer.has_begun and not in_closure:
        context.has_begun = True
        return
    models = states_stepped_by(optimizer)
    refuse(models, "step", REPLACED)
    if _core.has_local_grads():
        for param in params_of(optimizer):
            if param.grad is not None:
                _core.grad_owner(param.grad)  # raises for gradients that are not reduced
    if _core.has_held_units():
        parts = (part_of(param) for param in params_of(optimizer))
        refuse((each.state for each in parts if each and each.state), "step", UNSHARDED)
    if not context.is_checked:
        _check_first_step(optimizer)
    for each in EXTENSIONS:
        each.before_step(optimizer, models, in_closure)
    if _core.has_pending() and not getattr(optimizer, "multiplies_gradients", False):
        for param in params_of(optimizer):
            if param.grad is not None:
                _core.apply_pending(param.grad, False)
    note_values(stepped_by(optimizer))
    if hasattr(optimizer, "wait_for_ranks"):  # as its step does, and till then one may read alone
        optimizer.wait_for_ranks()
    for state in models:
        state.unit.engine.before_step(in_closure)
    context.has_begun = True
    if context.outer is not None:
        context.outer.has_begun = True


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Torch's post-hook, which runs only if the step has not raised."""
    context = context_of(optimizer)
    context.depth -= 1
    if context.depth > 0:
        return
    is_outermost = context.outer is None  # and counts as the step
    try:
        if is_outermost and context.models and not context.has_begun:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() has not called its closure, so it has stepped "
                "with gradients that zshard has not checked or clipped: call step() without one"
            )
        _end_of_step(optimizer)
        if is_outermost:
            note_step(optimizer)
        know(optimizer, in_step=True)  # its state exists now
    finally:
        _end_writes(optimizer)


def _end_of_step(optimizer: Optimizer) -> None:
    models = states_stepped_by(optimizer)
    for each in EXTENSIONS:
        each.after_step(optimizer, models)


def _end_writes(optimizer: Optimizer) -> None:
    """End the step's writes, unless a step around it continues."""
    context = context_of(optimizer)
    is_outermost, context.outer, context.is_open = context.outer is None, None, False
    if not is_outermost:
        return
    prepared = getattr(optimizer, "prepared", None)
    if prepared is not None:
        prepared.is_writing = True
        return
    for unit in units_stepped_by(optimizer):
        unit.engine.end_write()


@torch._disable_dynamo  # type: ignore[attr-defined]
def _after_failed_step(optimizer: Optimizer) -> None:
    """A step, its closure or a hook has raised: other ranks may read the parameters as they are."""
    context = context_of(optimizer)
    context.depth = max(0, context.depth - 1)
    if context.depth == 0 and context.is_open:  # not yet ended by _after_step()
        try:
            _end_of_step(optimizer)
        finally:
            _end_writes(optimizer)


# --- refusals -------------------------------------------------------------------------------------


def _refuse_by_class(optimizer: Optimizer) -> None:
    cls = type(optimizer)
    library, name = cls.__module__.partition(".")[0], cls.__name__.lower()
    if name == "zeroredundancyoptimizer":
        check_zero_redundancy(optimizer)
    takes_norms = library in _KERNELS and any(word in name for word in _NEED_NORMS)
    quantizes = library in _QUANTIZE and any(word in name for word in ("8bit", "4bit", "fp8"))
    if (takes_norms or quantizes) and any(map(_core.is_shard, params_of(optimizer))):
        what = "scales updates by norms" if takes_norms else "quantizes state in blocks"
        raise ShardError(
            f"{cls.__module__}.{cls.__name__} {what} of full parameters, but would see shards: use "
            'zshard.AdamW, AdamW8bit or SGD8bit, or FSDP(..., strategy="no_shard")'
        )
    if isinstance(optimizer, torch.optim.SparseAdam) and stepped_by(optimizer):
        raise NotImplementedError(
            "SparseAdam needs sparse gradients, but zshard's are dense: use torch.optim.Adagrad or "
            "SGD, which leave rows without a gradient unchanged as well"
        )


# --- torch's elementwise optimizers ---------------------------------------------------------------


def install_steps() -> None:
    """End the write of a step that raises. Run steps that are known to be elementwise on plain
    tensors: dispatching each of their operations would take as long as the operations. Torch wraps
    the step of a class when its first optimizer is constructed; for classes that already have
    optimizers, replace the inner function."""
    wrap = Optimizer.profile_hook_step

    @functools.wraps(wrap)
    def wrap_plain(step: Callable[..., Any]) -> Callable[..., Any]:
        of_torch = step.__module__.startswith("torch.optim.")
        is_elementwise = of_torch and step.__qualname__.partition(".")[0] in _ELEMENTWISE
        return _ending(wrap(_plainly(step) if is_elementwise else step))

    Optimizer.profile_hook_step = staticmethod(wrap_plain)  # type: ignore[method-assign,assignment]
    for name in _ELEMENTWISE:
        step: Any = getattr(torch.optim, name).step
        for cell in step.__closure__ if getattr(step, "hooked", False) else ():
            if cell.cell_contents is step.__wrapped__:
                cell.cell_contents = _plainly(step.__wrapped__)
    for cls in _classes_below(Optimizer):
        if getattr(vars(cls).get("step"), "hooked", False):
            cls.step = _ending(cls.step)


def _classes_below(cls: Any) -> Iterator[Any]:
    for each in cls.__subclasses__():
        yield each
        yield from _classes_below(each)


def _ending(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's wrapper of a step, with _after_failed_step() if anything in it raises."""

    @functools.wraps(step)
    def stepped(self: Optimizer, *args: object, **kwargs: object) -> Any:
        try:
            return step(self, *args, **kwargs)
        except BaseException:
            _after_failed_step(self)
            raise

    return stepped


def _plainly(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def stepped(self: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: object) -> Any:
        before = _n_entries(self)
        with plain(), _with_foreach(self):
            result = step(self, None if closure is None else guarded(closure), **kwargs)
        if _n_entries(self) != before:
            _guard_state(self)
        return result

    # The compiler would trace through classes that intercept operations, which it does not support.
    return torch._disable_dynamo(stepped)  # type: ignore[attr-defined]


def _n_entries(optimizer: Optimizer) -> int:
    """Return how much state there is; a script may read state that a step has yet to make."""
    return sum(len(state) for state in optimizer.state.values() if isinstance(state, dict))


@contextlib.contextmanager
def _with_foreach(optimizer: Optimizer) -> Iterator[None]:
    """Step shards on GPUs with foreach operations where torch's own classes would."""
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


def _guard_state(optimizer: Optimizer) -> None:
    """Guard state that was created within plain(), as its parameter is guarded."""
    for param in params_of(optimizer):
        part = _core.slice_part(param)
        for key, value in entries_of(optimizer.state, param).items() if part is not None else ():
            is_number = value.dim() == 0 and key in SCALARS if torch.is_tensor(value) else True
            if not is_number and value.dim() == param.dim():
                _core.mark_slice(value, part)
