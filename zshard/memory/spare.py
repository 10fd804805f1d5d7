"""Memory left to a rank once it steps: for an optimizer's state, and for units that stay gathered.

FSDP(...) does not know the optimizer, so it refuses only what the model alone exceeds, and warns of
what Adam's state adds. The first step knows the optimizer: state that exceeds what memory_limit,
the host or the control groups leave on a rank is an error with numbers on all ranks, instead of a
process that the kernel kills.

The memory of activations is unknown before a step. So with keep_gathered="auto" the ranks measure
their first two steps, and agree once on what all of them have left.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from zshard import _core
from zshard._logger import log
from zshard.memory.dry_run import size_in_group
from zshard.memory.fits import room_of_gpu
from zshard.memory.host_limits import Room, Sharing, resident, rooms
from zshard.memory.report import memory_of, without_new_state
from zshard.ranks.agreement import PublicCall, gather
from zshard.units.shards import known_parts
from zshard.units.units import MemoryLimit, state_of, units_of

_STEPS = 2  # optimizers may create state as late as the second step

_MIB = 1 << 20


# --- units that stay gathered ---------------------------------------------------------------------


class Spare:
    """Decides what stays gathered of a model, after its second step. Its ModelContext holds it."""

    def __init__(self, module: nn.Module, limit: MemoryLimit, sharing: Sharing) -> None:
        self._module = weakref.ref(module)
        self._limit, self._sharing = limit, sharing
        self._steps = 0
        self.is_open = True

    def like(self, module: nn.Module) -> Spare:
        """Return the same for a copy of the model."""
        return Spare(module, self._limit, self._sharing)

    def note_step(self) -> None:
        """Note a step of the model by an optimizer, which all ranks make. After the second, agree
        with the other ranks."""
        module = self._module()
        self._steps += 1
        if module is None or not self.is_open or self._steps < _STEPS:
            return
        engine = state_of(module).unit.engine
        if _core.capturing([next(module.parameters())]):
            return  # later: CUDA cannot be asked for free memory
        self.is_open = False
        if not engine.gathered()[2]:  # a gather costs nothing
            return
        with PublicCall("optimizer.step()"):
            least = -engine.max_over_ranks([-float(self._left(module))])[0]
        engine.keep_gathered(int(least * 0.9))  # the rest is for longer batches
        rank = state_of(module).comms.all.rank
        log.common(rank, "keep_gathered: %s bytes stay gathered", f"{engine.gathered()[0]:,}")

    def _left(self, module: nn.Module) -> int:
        """Return the bytes that this rank has never used, and has not promised to other models."""
        if isinstance(self._limit, int):
            return max(self._limit - memory_of(module, "peak")["total"], 0)
        device = next(module.parameters()).device
        if device.type == "cuda":
            limit = room_of_gpu(device) + torch.cuda.memory_allocated(device)
            peak = torch.cuda.max_memory_reserved(device)
        else:
            in_ram, left = resident(), rooms(self._sharing)
            if in_ram is None or not left:
                return 0
            limit, peak = min(left).bytes + in_ram.now, in_ram.peak
        models = {part.state.model for _, part in known_parts() if part.state is not None}
        spares = [each.spare for each in models if isinstance(each.spare, Spare)]
        others = sum(each._promised() for each in spares if each is not self)
        return max(limit - peak - others, 0)

    def _promised(self) -> int:
        """Return the bytes that will stay, but are not in this process's memory yet."""
        module = self._module()
        if module is None or isinstance(self._limit, int):
            return 0
        kept, reserved, _ = state_of(module).unit.engine.gathered()
        return max(kept - reserved, 0)


# --- the first step -------------------------------------------------------------------------------


def watch_first_steps(module: nn.Module, limit: int | str, sharing: Sharing) -> None:
    """Refuse the first step of an optimizer of this model, which is on the CPU, on all ranks if its
    state will not fit into the remaining memory of one of them."""
    model = weakref.ref(module)

    def check(optimizer: torch.optim.Optimizer) -> None:
        root = model()
        if root is not None:
            _check(root, optimizer, limit, sharing)

    state_of(module).model.first_step = check


def _check(
    module: nn.Module, optimizer: torch.optim.Optimizer, limit: int | str, sharing: Sharing
) -> None:
    sizes = {
        id(param): size
        for group in optimizer.param_groups
        if (size := size_in_group(optimizer, group)) is not None
        for param in group["params"]
    }
    if not sizes:  # on all ranks
        return
    state = state_of(module)
    states = [s for _, s in units_of(module) if s.unit.engine_id == state.unit.engine_id]
    needed, comm = 0, state.comms.all
    for unit in (each.unit for each in states):
        for i, param in enumerate(unit.params):
            is_new = id(param) in sizes and param.requires_grad and not optimizer.state.get(param)
            if is_new and not _core.offloads_state(param):
                needed += sizes[id(param)](param, int(unit.param(i)["numel"]))
    places = rooms(sharing)
    if isinstance(limit, int):
        left = max(limit - without_new_state(states), 0)
        places.append(Room(left, f"of the {limit / _MIB:.1f} MiB of memory_limit"))
    room = min(places, default=Room(needed, ""))
    name = type(optimizer).__name__
    with PublicCall(f"{name}.step()"):
        needs = gather(comm, (needed - room.bytes, comm.rank, needed, *room))
    missing, rank, needed, left, source = max(needs)
    if missing > 0:
        raise MemoryError(
            f"the first step of {name} does not fit in memory: rank {rank} of {comm.world} needs "
            f"{needed / _MIB:.1f} MiB for its state, but only {left / _MIB:.1f} MiB are left "
            f"({source}); use more ranks, SGD, FSDP(offload=zshard.Offload(directory=..., "
            "grads=True)), or FSDP(memory_limit=None), which does not check"
        )
