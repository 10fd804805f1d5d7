"""Random numbers that all ranks draw alike, though each has a seed of its own.

Where the generators differ when a model is sharded, as they do in a script that sets
no seed, the ranks keep a copy of rank 0's, and draw from it for parameters: rank 0's values, as of
a model that is initialized before it is sharded. A script that seeds later decides for itself.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from zshard import _core
from zshard.ranks.agreement import bytes_of

__all__ = ["default_generators", "keep_generator", "shared_draws"]


class _OfRank0(NamedTuple):
    """A copy of rank 0's generators.

    seed: this rank's own, while the copy is in use. is_fresh: nothing had been drawn after that.
    first: rank 0's. copies: by device.
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
    elif not all(each[0] for each in said):  # else it goes on, for the next unit of a model
        comm.broadcast(state, 0)
        copy = torch.Generator()
        copy.set_state(state)
        copies = {copy.device: copy}
        _kept[id(comm)] = _OfRank0(seed, _is_fresh(), copy.initial_seed(), copies)


def _is_fresh() -> bool:
    """Has nothing been drawn since the seed was set?"""
    fresh = torch.Generator().manual_seed(torch.initial_seed())
    return torch.equal(fresh.get_state(), torch.get_rng_state())


def _is_seeded_since(kept: _OfRank0) -> bool:
    """Has the script set a seed, which may be the one that it had?"""
    return kept.seed != torch.initial_seed() or (not kept.is_fresh and _is_fresh())


@contextlib.contextmanager
def shared_draws(comm: _core.Comm, device: torch.device) -> Iterator[None]:
    """Context manager in which the default generators give rank 0's numbers, if these are kept."""
    kept = _kept.get(id(comm)) if _kept else None
    if kept is None or _is_seeded_since(kept):
        _kept.pop(id(comm), None)
        yield
        return
    pairs = [(each, _copy_for(kept, each.device)) for each in default_generators(device)]
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


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Return those that a function may draw from for a tensor of that device."""
    found = [torch.default_generator]
    if device.type == "cuda":
        found.append(torch.cuda.default_generators[device.index])
    return found
