"""Random numbers for shards, in place: torch.nn.init and `p.normal_()`.

Each rank draws for the full tensor, as the plain model does, and keeps its shard. So it gets the
plain model's values under the same seed, holds one full tensor at a time, and does not communicate.
Each draw is noted: ranks whose random numbers differ get an error in their next collective.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zshard import _core
from zshard._errors import ShardError
from zshard.guard.rules import DRAWN_IN_PLACE
from zshard.guard.slices import Operation, plain, refuse, run_plain, slices_among
from zshard.guard.words import after_size
from zshard.ranks.agreement import bytes_of
from zshard.units.shards import Part

INITS = ("_no_grad_trunc_normal_", "kaiming_normal_")
"""Functions of torch.nn.init that run on full tensors, and do not ask the class of a tensor."""

_FANS = "_calculate_fan_in_and_fan_out"
"""By which torch.nn.init and torch's layers compute ranges."""

_ASKING = (nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_)
"""Functions that do ask."""


def install() -> None:
    """Make torch.nn.init initialize shards. Idempotent."""
    for name, change in (*((name, _for_shards) for name in INITS), (_FANS, _of_full_size)):
        func = getattr(nn.init, name)
        if not hasattr(func, "__wrapped__"):
            setattr(nn.init, name, change(func))


def _for_shards(func: Operation) -> Operation:
    @functools.wraps(func)
    def initialize(tensor: Tensor, *args: object, **kwargs: object) -> Any:
        if _core.slice_part(tensor) is None:
            return func(tensor, *args, **kwargs)
        return _asked(func, (tensor, *args), kwargs)

    return initialize


def _of_full_size(fans: Operation) -> Operation:
    """Return the fans of the full parameter; the next draws use a range that derives from them."""

    @functools.wraps(fans)
    def computed(tensor: Tensor) -> Any:
        part = _core.slice_part(tensor)
        if part is None:
            return fans(tensor)
        if part.state is not None:
            part.state.sizes_read.clear()
        return fans(torch.empty(part.shape, device="meta"))

    return computed


def _asked(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a function of torch.nn.init."""
    others = dict(kwargs)
    tensor, *rest = args or (others.pop("tensor"),)
    part = _core.slice_part(tensor)
    if part is None:
        return run_plain(func, args, kwargs)
    if "kaiming" not in func.__name__:  # its number is a slope
        _refuse_numbers_of_shards(func, part, (*rest, *others.values()))
    return _fill(func, tensor, part, rest, others)


def _draw(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a method such as normal_()."""
    target, *rest = args
    part = _core.slice_part(target)
    others = (*rest, *kwargs.values())
    if part is None or (torch.is_grad_enabled() and target.requires_grad and target.is_leaf):
        return run_plain(func, args, kwargs)  # the latter raises torch's own error
    is_recorded = torch.is_grad_enabled() and target.requires_grad
    has_many = any(isinstance(each, Tensor) and each.numel() != 1 for each in others)
    if is_recorded or slices_among(others) or has_many:
        return refuse(func, args, kwargs)
    _refuse_numbers_of_shards(func, part, others)
    return _fill(func, target, part, rest, kwargs)


def _refuse_numbers_of_shards(func: Operation, part: Part, values: Iterable[Any]) -> None:
    """Refuse numbers that may derive from the size of the shard."""
    has_numbers = any(isinstance(each, int | float | Tensor) for each in values)
    if has_numbers and part.is_size_read:
        raise ShardError(
            after_size(f"{func.__name__.removeprefix('_no_grad_')}() got numbers for", part)
        )


def _fill(
    func: Operation, target: Tensor, part: Part, args: Iterable[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    """Run the function on a full tensor, and keep this rank's shard of it."""
    with plain():
        full = torch.empty(part.shape, dtype=target.dtype, device=target.device)
        generators = [torch.default_generator]
        if target.is_cuda:
            generators.append(torch.cuda.default_generators[target.device.index])
        generators += [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
        before = [each.get_state() for each in generators]
        func(full, *args, **kwargs)
        after = [each.get_state() for each in generators]
    with part.writing(target, func):
        with plain(), torch.no_grad():
            target.copy_(part.of(full))
        if not all(map(torch.equal, before, after)):
            # The same on ranks whose generators were in the same state.
            digest = hashlib.blake2b(func.__name__.encode(), digest_size=8)
            for state in after:
                digest.update(bytes_of(state))
            part.note_draw(target, int.from_bytes(digest.digest(), "little"))
    return target


HANDLERS: dict[Any, Operation] = {
    **{getattr(Tensor, name): _draw for name in DRAWN_IN_PLACE},
    **dict.fromkeys(_ASKING, _asked),
}
