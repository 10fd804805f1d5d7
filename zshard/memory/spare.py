"""Memory left to a rank once it steps: for an optimizer's state, and for units that stay gathered.

FSDP(...) does not know the optimizer, so it refuses only what the model alone exceeds, and warns of
what Adam's state adds. The first step knows the optimizer: state that exceeds what the host and the
control groups leave is an error with numbers, whatever memory_limit is, instead of a process that
the kernel kills.

The memory of activations is unknown before a step. So with keep_gathered="auto" a rank measures its
first steps and offers what is left. The core takes the least offer of all ranks, at the end of a
backward that all ranks ran (csrc/engine/keep_gathered.h). Later measurements can only lower it.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from zshard import _core
from zshard.memory.fits import MemoryLimit, room_of_gpu
from zshard.memory.host_limits import Sharing, resident, rooms
from zshard.memory.report import STATE_TENSORS, memory_of
from zshard.optim.hooks import before_first_steps
from zshard.optim.step_digest import watch_steps
from zshard.ranks.devices import CPU
from zshard.units.units import KeepFull, state_of, units_of

_FIRST = 2  # always measure these steps: optimizers may create state in the second one, too
_EACH = 100  # then measure one step in so many
_MARGIN = 10  # leave a tenth of the rank's limit for longer batches

_MIB = 1 << 20


# --- units that stay gathered ---------------------------------------------------------------------


def crosses_hosts(comm: _core.Comm) -> bool:
    """Return whether the ranks that gather from each other are on several (equal) hosts."""
    return comm.per_host > 0


def keep_between(keep: KeepFull, comm: _core.Comm) -> KeepFull:
    """Resolve `keep` between these ranks: "auto" keeps nothing within one host, where a gather is
    cheap."""
    return keep if not keep.measured or crosses_hosts(comm) else KeepFull()


class Spare:
    """Measures a model's steps on this rank. The root's State holds it."""

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
        """Note a step of the model by an optimizer. After some of the steps, offer the remaining
        memory."""
        module = self._module()
        if module is None:
            return
        _, reserved, _, costs = state_of(module).unit.engine.kept()
        self._steps += 1
        known = reserved == self._reserved  # measure the first step after a change, too
        if not costs or (self._steps > _FIRST and self._steps % _EACH and known):
            return
        if _core.capturing([next(module.parameters())]):
            return  # CUDA may not be asked for its free memory
        self._reserved = reserved
        limit, peak = self._measured(module)
        if peak > self._peak:
            self._peak, self._kept = peak, reserved
        left = limit - (self._peak - self._kept) - self._promised_to_others()
        self._offered = min(max(left, 0), sum(s.unit.bytes["full"] for _, s in units_of(module)))
        state_of(module).unit.engine.offer_memory(self._offered)

    def _measured(self, module: nn.Module) -> tuple[int, int]:
        """Return the bytes that this rank may use altogether, and the most that it has used."""
        if isinstance(self._limit, int):  # no activations, no margin
            return self._limit, memory_of(module, "peak")["total"]
        device = next(module.parameters()).device
        if device.type == "cuda":
            limit = room_of_gpu(device) + torch.cuda.memory_allocated(device)
            return limit - limit // _MARGIN, torch.cuda.max_memory_reserved(device)
        found = resident()
        left = rooms(self._sharing)
        if found is None or not left:
            return 0, 0
        limit = min(left).bytes + found.now
        return limit - limit // _MARGIN, found.peak

    def _promised_to_others(self) -> int:
        """Return the bytes of the same memory that other models of this process will take."""
        if isinstance(self._limit, int):
            return 0
        return sum(each._promised() for each in _spares if each is not self)

    def _promised(self) -> int:
        """Return the bytes that are offered or kept, but not in this process's memory yet."""
        module = self._module()
        if module is None or isinstance(self._limit, int):
            return 0
        kept, reserved, is_open, costs = state_of(module).unit.engine.kept()
        if not costs:
            return 0
        return self._offered if is_open else max(kept - reserved, 0)


_spares: weakref.WeakSet[Spare] = weakref.WeakSet()


# --- the first step -------------------------------------------------------------------------------


def watch_first_steps(module: nn.Module, limit: MemoryLimit, sharing: Sharing, device: str) -> None:
    """Refuse the first step of an optimizer of this model if its state will not fit into this
    rank's remaining memory; not with limit=None."""
    if limit is None or device != CPU:
        return
    model = weakref.ref(module)

    def check(optimizer: torch.optim.Optimizer) -> bool:
        found = model()
        if found is not None:
            _check(found, optimizer, sharing)
        return found is not None

    before_first_steps(check)


def _check(module: nn.Module, optimizer: torch.optim.Optimizer, sharing: Sharing) -> None:
    needed = _bytes_of_state(module, optimizer)
    if needed == 0:
        return
    room = min(rooms(sharing), default=None)
    if room is None or needed <= room.bytes:
        return
    state = state_of(module)
    raise MemoryError(
        f"the first step of {type(optimizer).__name__} does not fit in memory: rank "
        f"{state.comms.all.rank} of {state.comms.all.world} needs {needed / _MIB:.1f} MiB for its "
        f"state, but only {room.bytes / _MIB:.1f} MiB are left ({room.source}). Use more ranks, an "
        "optimizer with less state (SGD), FSDP(offload=zshard.Offload(directory=..., grads=True)) "
        "or FSDP(memory_limit=None), which does not check"
    )


def _bytes_of_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that the first step will allocate for this model's parameters."""
    each = STATE_TENSORS.get(type(optimizer).__name__.lower(), 0)
    if type(optimizer).__name__ == "SGD":
        each = int(any(group.get("momentum") for group in optimizer.param_groups))
    if each == 0 or len(optimizer.state) > 0:
        return 0
    given = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return each * sum(
        int(state.unit.param(i)["numel"]) * param.itemsize
        for _, state in units_of(module)
        for i, param in enumerate(state.unit.params)
        if id(param) in given and param.requires_grad and not _core.offloads_state(param)
    )
