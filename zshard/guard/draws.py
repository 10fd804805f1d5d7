"""Random numbers for slices in place: torch.nn.init, and `p.normal_()`.

Each rank draws for the full tensor, as the plain model does, and keeps its part: the
values of the plain model under the same seed, of one tensor at a time, without communication. What
was drawn is noted; ranks whose random numbers differ find out where they meet next.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zshard import _core
from zshard._errors import ShardError
from zshard.guard.rules import DRAWN_IN_PLACE
from zshard.guard.shared_draws import default_generators, shared_draws
from zshard.guard.sizes import has_told, is_from_init, is_from_torch
from zshard.guard.slices import Handler, plain, refuse, run_plain, slices_among
from zshard.guard.words import refused_draw
from zshard.ranks.agreement import bytes_of
from zshard.units.shards import Part

__all__ = ["HANDLERS", "INITS", "install"]

INITS = (
    *("dirac_", "eye_", "kaiming_normal_", "orthogonal_", "sparse_", "xavier_normal_"),
    *("xavier_uniform_", "_no_grad_trunc_normal_"),
)
"""Functions of torch.nn.init that do not ask tensors of other classes about themselves."""

_ASKING = (nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_)
"""Those that do."""


def install() -> None:
    """Have torch.nn.init initialize slices. Idempotent."""
    for name in INITS:
        func = getattr(nn.init, name)
        if not hasattr(func, "__wrapped__"):
            setattr(nn.init, name, _for_slices(func))


def _for_slices(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def initialize(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        part = _core.slice_part(tensor) if isinstance(tensor, Tensor) else None
        if part is None:
            return func(tensor, *args, **kwargs)
        return _initialize(func, tensor, part, args, kwargs)

    return initialize


def _asked(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A function of torch.nn.init that has asked."""
    others = dict(kwargs)
    tensor, *rest = args or (others.pop("tensor"),)
    part = _core.slice_part(tensor)
    if part is None:
        return run_plain(func, args, kwargs)
    return _initialize(func, tensor, part, rest, others)


def _initialize(
    func: Callable[..., Any], tensor: Tensor, part: Part, args: Any, kwargs: Mapping[str, Any]
) -> Tensor:
    if func is not nn.init.kaiming_uniform_:  # which always gets the slope of leaky_relu
        _refuse_numbers_of_shards(func, part, (*args, *kwargs.values()))
    return _fill(func, tensor, part, args, kwargs)


def _draw(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """A method such as normal_()."""
    target, *rest = args
    part = _core.slice_part(target)
    others = (*rest, *kwargs.values())
    if part is None or (torch.is_grad_enabled() and target.requires_grad and target.is_leaf):
        return run_plain(func, args, kwargs)  # the latter is torch's own error
    is_recorded = torch.is_grad_enabled() and target.requires_grad
    if is_recorded or slices_among(others) or any(map(_has_many, others)):
        return refuse(func, args, kwargs)
    if not is_from_init():
        _refuse_numbers_of_shards(func, part, others)
    return _fill(func, target, part, rest, kwargs)


def _has_many(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() != 1


def _refuse_numbers_of_shards(func: Callable[..., Any], part: Part, given: Iterable[Any]) -> None:
    """They may have been computed from the size of the shard."""
    has_numbers = any(isinstance(each, int | float | Tensor) for each in given)
    if has_numbers and has_told(part) and not is_from_torch():
        raise ShardError(refused_draw(func, part))


def _fill(
    func: Callable[..., Any], target: Tensor, part: Part, args: Any, kwargs: Mapping[str, Any]
) -> Tensor:
    """Run the function on a full tensor, and keep this rank's part of it."""
    with plain(), shared_draws(part.comm, target.device):
        full = torch.empty(part.shape, dtype=target.dtype, device=target.device)
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
        generators = default_generators(target.device) + given
        before = [each.get_state() for each in generators]
        func(full, *args, **kwargs)
        after = [each.get_state() for each in generators]
    with part.writing(target, func):
        with plain(), torch.no_grad():
            target.copy_(part.of(full))
        if not all(map(torch.equal, before, after)):
            part.note_draw(target, _digest(func, after))
    return target


def _digest(func: Callable[..., Any], states: Iterable[Tensor]) -> int:
    """A number that is the same on ranks whose generators were in the same state."""
    digest = hashlib.blake2b(func.__name__.encode(), digest_size=8)
    for state in states:
        digest.update(bytes_of(state))
    return int.from_bytes(digest.digest(), "little")


HANDLERS: dict[Any, Handler] = {
    **{getattr(Tensor, name): _draw for name in DRAWN_IN_PLACE},
    **dict.fromkeys(_ASKING, _asked),
}
