"""Does an optimizer's state fit, as its first step is about to make it?

FSDP(...) cannot know the optimizer, so it refuses what the model alone takes, and
warns of what Adam's state adds. Before its first step the optimizer is known: one whose state the
host, the control groups and the process's limits do not allow, whatever memory_limit says, is an
error with numbers, in place of a process that the kernel kills.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from zshard import _core
from zshard.memory.fits import MemoryLimit, Sharing
from zshard.memory.host_limits import room_of_cgroup, room_of_host, room_of_process, shared_by
from zshard.optim.hooks import before_first_steps
from zshard.ranks.devices import CPU
from zshard.units.units import state_of, units_of

__all__ = ["watch_first_steps"]

_MIB = 1 << 20
_TENSORS = {
    **dict.fromkeys(("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adadelta"), 2),
    **dict.fromkeys(("RMSprop", "Rprop"), 1),
}
"""By the class of an optimizer, how many tensors of a parameter's size its state has."""


def watch_first_steps(module: nn.Module, limit: MemoryLimit, sharing: Sharing, device: str) -> None:
    """Refuse the first step of an optimizer of this model whose state will not fit into what is
    left to this rank; not with limit=None."""
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
    left, source = _room(sharing)
    if needed <= left:
        return
    state = state_of(module)
    raise MemoryError(
        f"the first step of {type(optimizer).__name__} does not fit in memory: rank "
        f"{state.comms.all.rank} of {state.comms.all.world} needs {needed / _MIB:.1f} MiB for its "
        f"state, but only {max(left, 0) / _MIB:.1f} MiB are left ({source}). Use more ranks, an "
        "optimizer with less state (SGD), FSDP(offload=zshard.Offload(directory=..., grads=True)) "
        "or FSDP(memory_limit=None), which does not check"
    )


def _bytes_of_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What the first step will allocate for this model's parameters."""
    each: Any = _TENSORS.get(type(optimizer).__name__, 0)
    if type(optimizer).__name__ == "SGD":
        each = int(any(group.get("momentum") for group in optimizer.param_groups))
    if each == 0 or len(optimizer.state) > 0:
        return 0
    given = {id(param) for group in optimizer.param_groups for param in group["params"]}
    size: int = sum(
        state.unit.param(i)["numel"] * param.itemsize
        for _, state in units_of(module)
        for i, param in enumerate(state.unit.params)
        if id(param) in given and param.requires_grad and not _core.offloads_state(param)
    )
    return int(each) * size


def _room(sharing: Sharing) -> tuple[int, str]:
    """The bytes left on this rank, and under which limit."""
    host, cgroup = room_of_host(), room_of_cgroup()
    found = []
    if host is not None:
        found.append(
            (host.bytes // sharing.host, f"the host's MemAvailable{shared_by(sharing.host)}")
        )
    if cgroup is not None:
        found.append(
            (cgroup.bytes // sharing.cgroup, f"the cgroup's limit{shared_by(sharing.cgroup)}")
        )
    for name in ("RLIMIT_DATA", "RLIMIT_AS"):
        left = room_of_process(name)
        if left is not None:
            found.append((left, name))
    return min(found, default=(1 << 62, ""))
