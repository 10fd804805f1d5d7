"""Random numbers for shards, in place: torch.nn.init and `p.normal_()`.

Each rank draws for the full tensor, as the plain model does, and keeps its shard. So it gets the
plain model's values under the same seed, holds one full tensor at a time, and does not communicate.
Each draw is noted: ranks whose random numbers differ get an error in their next collective.

In a script that sets no seed, the ranks' generators differ when the model is sharded. Then every
rank keeps a copy of rank 0's generator and draws from it for parameters, which gives rank 0's
values, as if the model had been initialized before sharding. A seed that the script sets later
takes precedence.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zshard import _core
from zshard._errors import ShardError
from zshard.guard.rules import DRAWN_IN_PLACE
from zshard.guard.slices import Operation, plain, refuse, run_plain, slices_among
from zshard.guard.words import refused_draw
from zshard.ranks.agreement import bytes_of
from zshard.units.shards import Part, asked_for_size

__all__ = ["HANDLERS", "INITS", "install", "keep_generator"]

INITS = ("_no_grad_trunc_normal_", "kaiming_normal_", "orthogonal_")
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
        for each in [each for each in asked_for_size if each.unit is part.unit]:
            asked_for_size.discard(each)
        return fans(torch.empty(part.shape, device="meta"))

    return computed


def _asked(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a function of torch.nn.init."""
    others = dict(kwargs)
    tensor, *rest = args or (others.pop("tensor"),)
    part = _core.slice_part(tensor)
    if part is None:
        return run_plain(func, args, kwargs)
    if not any(word in func.__name__ for word in ("kaiming", "orthogonal")):  # a slope, a factor
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
    if is_recorded or slices_among(others) or any(map(_has_many, others)):
        return refuse(func, args, kwargs)
    _refuse_numbers_of_shards(func, part, others)
    return _fill(func, target, part, rest, kwargs)


def _has_many(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() != 1


def _refuse_numbers_of_shards(func: Operation, part: Part, given: Iterable[Any]) -> None:
    """Refuse numbers that may derive from the size of the shard."""
    has_numbers = any(isinstance(each, int | float | Tensor) for each in given)
    if has_numbers and part.root in asked_for_size:
        raise ShardError(refused_draw(func, part))


def _fill(
    func: Operation, target: Tensor, part: Part, args: Iterable[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    """Run the function on a full tensor, and keep this rank's shard of it."""
    with plain(), _shared_draws(part.comm, target.device):
        full = torch.empty(part.shape, dtype=target.dtype, device=target.device)
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)]
        generators = _default_generators(target.device) + given
        before = [each.get_state() for each in generators]
        func(full, *args, **kwargs)
        after = [each.get_state() for each in generators]
    with part.writing(target, func):
        with plain(), torch.no_grad():
            target.copy_(part.of(full))
        if not all(map(torch.equal, before, after)):
            part.note_draw(target, _digest(func, after))
    return target


def _digest(func: Operation, states: Iterable[Tensor]) -> int:
    """Return a number that is the same on ranks whose generators were in the same state."""
    digest = hashlib.blake2b(func.__name__.encode(), digest_size=8)
    for state in states:
        digest.update(bytes_of(state))
    return int.from_bytes(digest.digest(), "little")


class _OfRank0(NamedTuple):
    """A copy of rank 0's generators.

    seed: this rank's own, while the copy is in use. is_fresh: the script had drawn nothing after
    seeding. first: rank 0's. copies: by device.
    """

    seed: int
    is_fresh: bool
    first: int
    copies: dict[torch.device, torch.Generator]


_kept: dict[int, _OfRank0] = {}
"""By id() of the ranks' transport. One that has taken the place of another may go on with its copy:
all ranks do, or none."""


def keep_generator(comm: _core.Comm) -> None:
    """Keep a copy of rank 0's generator for draws of parameters if the ranks' generators differ.
    Collective."""
    if comm.world == 1:
        return
    state, seed = torch.get_rng_state(), torch.initial_seed()
    known = _kept.get(id(comm))
    is_known = bytes([known is not None and known.seed == seed])
    said = comm.exchange(is_known + hashlib.sha256(bytes_of(state)).digest())
    if len({each[1:] for each in said}) == 1:
        _kept.pop(id(comm), None)
    elif not all(each[0] for each in said):  # otherwise the copy serves the model's next unit, too
        comm.broadcast(state, 0)
        copy = torch.Generator()
        copy.set_state(state)
        copies = {copy.device: copy}
        _kept[id(comm)] = _OfRank0(seed, _is_fresh(), copy.initial_seed(), copies)


def _is_fresh() -> bool:
    """Return whether the script has drawn nothing since it set the seed."""
    fresh = torch.Generator().manual_seed(torch.initial_seed())
    return torch.equal(fresh.get_state(), torch.get_rng_state())


def _is_seeded_since(kept: _OfRank0) -> bool:
    """Return whether the script has set a seed since, possibly the same one."""
    return kept.seed != torch.initial_seed() or (not kept.is_fresh and _is_fresh())


@contextlib.contextmanager
def _shared_draws(comm: _core.Comm, device: torch.device) -> Iterator[None]:
    """Context manager in which the default generators give rank 0's numbers, if zshard keeps a
    copy."""
    kept = _kept.get(id(comm)) if _kept else None
    if kept is None or _is_seeded_since(kept):
        _kept.pop(id(comm), None)
        yield
        return
    pairs = [(each, _copy_for(kept, each.device)) for each in _default_generators(device)]
    own = [each.get_state() for each, _ in pairs]
    for each, copy in pairs:
        each.set_state(copy.get_state())
    try:
        yield
    finally:
        for (each, copy), state in zip(pairs, own, strict=True):
            copy.set_state(each.get_state())
            each.set_state(state)


def _copy_for(kept: _OfRank0, device: torch.device) -> torch.Generator:
    if device not in kept.copies:
        kept.copies[device] = torch.Generator(device).manual_seed(kept.first)
    return kept.copies[device]


def _default_generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators that a function may draw from for a tensor of that device."""
    found = [torch.default_generator]
    if device.type == "cuda":
        found.append(torch.cuda.default_generators[device.index])
    return found


HANDLERS: dict[Any, Operation] = {
    **{getattr(Tensor, name): _draw for name in DRAWN_IN_PLACE},
    **dict.fromkeys(_ASKING, _asked),
}
