"""What a rank can spare for parameters that stay gathered from forward to backward: keep_gathered.

Nobody knows before a step how much the activations take. So a rank measures after its
first steps, and offers what is left; the core takes the least that all ranks offer, at the end of a
backward in which all have met (csrc/engine/keep_gathered.h). A later measurement can only lower it.
"""

from __future__ import annotations

import sys
import weakref
from typing import NamedTuple

from torch import nn

from zshard import _core
from zshard.memory.fits import MemoryLimit, Sharing, parse_size
from zshard.memory.host_limits import resident, room_of_cgroup, room_of_host, room_of_process
from zshard.memory.report import memory_of
from zshard.optim.step_digest import watch_steps
from zshard.ranks.devices import CPU
from zshard.units.units import Keep, state_of, units_of

KeepGathered = bool | int | str

_FIRST = 2  # steps that are always measured: optimizers may make state in the second as well
_EACH = 100  # and of later ones, each so many
_MARGIN = 10  # a tenth of what the rank may have is left for longer batches

_ALL = sys.maxsize


def parse_keep(keep_gathered: KeepGathered, limit: MemoryLimit, device: str) -> Keep:
    """Translate FSDP()'s argument. "auto" keeps nothing where there is no limit to go by, and on
    GPUs, where nothing has been measured yet.

    Raises TypeError for an argument of another type, ValueError for a malformed size.
    """
    if isinstance(keep_gathered, bool):
        return Keep(_ALL if keep_gathered else 0)
    if keep_gathered == "auto":
        return Keep(0, measured=limit is not None and device == CPU)
    return Keep(parse_size("keep_gathered", keep_gathered, '"auto", True or False'))


def crosses_hosts(comm: _core.Comm) -> bool:
    """Return whether the ranks that gather from each other are on several (equal) hosts."""
    return comm.per_host > 0


def keep_between(keep: Keep, comm: _core.Comm) -> Keep:
    """Return what `keep` comes to between these ranks: "auto" keeps nothing within one host,
    where a gather is cheap."""
    return keep if not keep.measured or crosses_hosts(comm) else Keep()


def words_of(keep: Keep) -> str:
    """Return what ranks must agree on, as a script would write it."""
    if keep.measured:
        return "'auto'"
    return str(keep.most > 0) if keep.most in (0, _ALL) else f"{keep.most} bytes"


class _Measured(NamedTuple):
    """limit: bytes that this rank may use altogether. peak: the most that it has used."""

    limit: int
    peak: int


class Spare:
    """Measures a model's steps on this rank. Kept by the root's State."""

    def __init__(self, module: nn.Module, limit: MemoryLimit, sharing: Sharing) -> None:
        self._module = weakref.ref(module)
        self._limit, self._sharing = limit, sharing
        self._steps = self._peak = self._kept = self._offered = self._reserved = 0
        _spares.add(self)
        watch_steps(state_of(module).unit.engine_id, self)

    def like(self, module: nn.Module) -> Spare:
        """Return the same for a copy of the model."""
        return Spare(module, self._limit, self._sharing)

    def note_step(self) -> None:
        """An optimizer has stepped the model. Offers what is left, after some of the steps."""
        module = self._module()
        if module is None:
            return
        _, reserved, _, costs = state_of(module).unit.engine.kept()
        self._steps += 1
        known = reserved == self._reserved  # the first step with what stays is measured, too
        if not costs or (self._steps > _FIRST and self._steps % _EACH and known):
            return
        self._reserved = reserved
        found = self._measured(module)
        if found.peak > self._peak:
            self._peak, self._kept = found.peak, reserved
        left = found.limit - (self._peak - self._kept) - self._promised_to_others()
        self._offered = min(max(left, 0), sum(s.unit.bytes["full"] for _, s in units_of(module)))
        state_of(module).unit.engine.offer_memory(self._offered)

    def _measured(self, module: nn.Module) -> _Measured:
        if isinstance(self._limit, int):  # of what zshard allocates: no activations, no margin
            return _Measured(self._limit, memory_of(module, "peak")["total"])
        found = resident()
        rooms = _rooms(self._sharing)
        if found is None or not rooms:
            return _Measured(0, 0)
        limit = min(rooms) + found.now
        return _Measured(limit - limit // _MARGIN, found.peak)

    def _promised_to_others(self) -> int:
        """Return what other models of this process will take of the same memory."""
        if isinstance(self._limit, int):
            return 0
        return sum(each._promised() for each in _spares if each is not self)

    def _promised(self) -> int:
        """Return the bytes that are offered or kept, and not in this process's memory yet."""
        module = self._module()
        if module is None or isinstance(self._limit, int):
            return 0
        kept, reserved, is_open, costs = state_of(module).unit.engine.kept()
        if not costs:
            return 0
        return self._offered if is_open else max(kept - reserved, 0)


_spares: weakref.WeakSet[Spare] = weakref.WeakSet()


def _rooms(sharing: Sharing) -> list[int]:
    """Return the bytes that each limit of the host and of the process leaves to this rank."""
    host, cgroup = room_of_host(), room_of_cgroup()
    rooms = [room_of_process(name) for name in ("RLIMIT_DATA", "RLIMIT_AS")]
    rooms.append(None if host is None else host.bytes // sharing.host)
    rooms.append(None if cgroup is None else cgroup.bytes // sharing.cgroup)
    return [room for room in rooms if room is not None]
