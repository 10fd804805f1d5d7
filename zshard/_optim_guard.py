"""Reject optimizers that would compute something else on shards than on full parameters.

The one idea: a shard is a flat slice of a parameter. An elementwise rule (AdamW, SGD, ...) computes
the same on a shard as on the full parameter; one that needs the matrix (Muon, Adafactor, Shampoo)
or a norm over the parameter or the model (LAMB, LARS, LBFGS) would be silently wrong. A hook that
torch runs before every optimizer's step rejects the second kind by name and warns once about a
class it does not know. Another one tells the models that they were stepped, as a step that one rank
leaves out is an error. It costs a dictionary look-up, and for an optimizer that is not known to be
elementwise one cheap check per parameter until the first shard is found.

With strategy "no_shard" and with world size 1 parameters are not sharded, and everything passes.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from zshard import _core
from zshard._parts import units_stepped_by

__all__ = ["install", "know", "seen_optimizers"]


class _Kind(Enum):
    ELEMENTWISE = "elementwise"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    WARNED_OF = "unknown, and the user has been warned"


_ELEMENTWISE = (
    *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
)
"""Classes of torch.optim, and those of the same name in zshard."""

_MATRIX = "it needs full matrices, but a shard is a flat slice"
_PARAM_NORM = "it scales updates by norms over full parameters"
_ALL_NORM = "it needs dot products over all parameters of the model"

_REFUSED = {
    "adafactor": _MATRIX,
    "came": _MATRIX,
    "galore": _MATRIX,
    "kfac": _MATRIX,
    "muon": _MATRIX,
    "shampoo": _MATRIX,
    "soap": _MATRIX,
    "sm3": _MATRIX,
    "lamb": _PARAM_NORM,
    "lars": _PARAM_NORM,
    "novograd": _PARAM_NORM,
    "dadapt": _ALL_NORM,
    "lbfgs": _ALL_NORM,
    "prodigy": _ALL_NORM,
}
"""Words in a class's name, in lower case, and why such a class is rejected."""

_kinds: dict[type, _Kind] = {}
_seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_handles: list[RemovableHandle] = []


def install() -> None:
    """Start watching the steps of all optimizers. Idempotent."""
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))
        _handles.append(register_optimizer_step_post_hook(_after_step))


def know(optimizer: torch.optim.Optimizer) -> None:
    """Count an optimizer as seen even if its step() is never called."""
    _seen.add(optimizer)


def seen_optimizers() -> list[torch.optim.Optimizer]:
    """Return all living optimizers that have stepped, or that step in backward."""
    return list(_seen)


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Torch's pre-hook. Raises RuntimeError for an optimizer that is wrong on the shards it has,
    for gradients that have not been reduced, and for parameters that unshard() has gathered."""
    _seen.add(optimizer)
    for unit in units_stepped_by(optimizer):
        unit.engine.before_step()
    if _core.has_local_grads():
        _refuse_local_grads(optimizer)
    if _core.has_held_units():
        _refuse_held_units(optimizer)
    cls = type(optimizer)
    kind = _kinds.get(cls)
    if kind is None:
        kind = _kinds[cls] = _kind_of(cls)
    if kind in (_Kind.ELEMENTWISE, _Kind.WARNED_OF) or not _holds_shards(optimizer):
        return
    if kind is _Kind.REFUSED:
        raise RuntimeError(
            f"{cls.__name__} cannot update sharded parameters: {_reason(cls)}. Use an elementwise "
            'optimizer (zshard.AdamW, torch.optim.SGD, ...), or FSDP(..., strategy="no_shard")'
        )
    _kinds[cls] = _Kind.WARNED_OF
    warnings.warn(
        f"{cls.__module__}.{cls.__qualname__} is updating sharded parameters (flat slices of shape "
        "(k, 1, ..., 1)): results are correct only if its update is elementwise and uses neither "
        "norms over parameters nor their shapes",
        UserWarning,
        stacklevel=3,
    )


def _after_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Torch's post-hook, which it runs only if the step has not raised."""
    for unit in units_stepped_by(optimizer):
        unit.engine.after_step()


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


def _kind_of(cls: type) -> _Kind:
    if _step_of(cls) in _elementwise_steps():
        return _Kind.ELEMENTWISE
    return _Kind.UNKNOWN if _reason(cls) is None else _Kind.REFUSED


def _reason(cls: type) -> str | None:
    """Return why the class, or one of its bases, is rejected; None if it is not."""
    for base in cls.__mro__:
        for word, reason in _REFUSED.items():
            if _has_word(base.__name__, word):
                return reason
    return None


def _has_word(name: str, word: str) -> bool:
    """Whether `word` is a word of the CamelCase `name`, or several.

    So that SOAP, DistributedShampoo and DAdaptAdam are found, and LambdaSGD is no LAMB.
    """
    at = name.lower().find(word)
    if at < 0:
        return False
    starts = at == 0 or name[at].isupper()
    return starts and not name[at + len(word) :][:1].islower()


def _elementwise_steps() -> Iterator[Callable[..., Any]]:
    """The step functions that are known to be elementwise.

    Functions and not classes: a subclass that brings its own step is another optimizer.
    """
    from zshard import optim

    for home in (torch.optim, optim):
        for name in _ELEMENTWISE:
            if hasattr(home, name):
                yield _step_of(getattr(home, name))


def _step_of(cls: type) -> Callable[..., Any]:
    """The class's step without the wrapper that torch puts around it for profiling and hooks."""
    step: Callable[..., Any] = inspect.unwrap(getattr(cls, "step"))  # noqa: B009
    return step


def _holds_shards(optimizer: torch.optim.Optimizer) -> bool:
    return any(_core.is_shard(p) for group in optimizer.param_groups for p in group["params"])
