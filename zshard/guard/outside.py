"""Code that would take shards for full tensors without an operation that the guard sees.

Collectives, DistributedDataParallel, ZeroRedundancyOptimizer and safetensors use a tensor's memory
directly. The ranks' shards of a parameter are different elements, often of one shape, so such code
would silently mix or overwrite them, or write one rank's shard to a file. fully_shard() would
replace the parameters.

Barriers also matter here. One rank may evaluate alone weights that all ranks have written in place
(a moving average), but only once the other ranks have written theirs. The script's own barrier
marks that point.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed._composable.contract import STATE_KEY
from torch.nn.parallel import DistributedDataParallel

from zshard import _core
from zshard._errors import ShardError
from zshard.guard.plain import slices_among
from zshard.guard.words import written_to_file
from zshard.units.shards import known_parts


def install_check() -> None:
    """Make torch's collectives, which all use one function to check a tensor, refuse shards."""
    check = distributed_c10d._check_single_tensor

    @functools.wraps(check)
    def checked(param: object, param_name: str) -> None:
        check(param, param_name)
        if parts := slices_among([param]):
            raise ShardError(
                f"a collective was called on a shard of '{parts[0].name}' ({parts[0].elements}), "
                "which differs between ranks. Gradients are averaged already; for full tensors, "
                "call zshard.full_tensor(t) on all ranks."
            )

    distributed_c10d._check_single_tensor = checked


def install_barrier() -> None:
    """Notify models whose ranks read each other's shards of the barriers of the thread that has
    made them. Other threads (of an asynchronous checkpoint, say) have barriers of their own."""
    barrier = dist.barrier

    @functools.wraps(barrier)
    def notifying_barrier(
        group: dist.ProcessGroup | None = None, async_op: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        if not async_op and (group is None or dist.get_world_size(group) == dist.get_world_size()):
            _note_barrier()
        return barrier(group, async_op, *args, **kwargs)

    dist.barrier = notifying_barrier


def _note_barrier() -> None:
    parts = [part for _, part in known_parts()]
    states = [state for part in parts if (state := part.state) is not None]
    thread = threading.get_ident()
    for engine in dict.fromkeys(s.unit.engine for s in states if s.model.thread == thread):
        engine.note_barrier()
    for record in dict.fromkeys(part.peers for part in parts if part.peers is not None):
        record.note_all()  # what scripts have put into the state of known optimizers


# --- DistributedDataParallel, fully_shard, ZeroRedundancyOptimizer --------------------------------


def _refuse(wrapper: str, instead: str) -> NoReturn:
    raise TypeError(
        f"{wrapper} cannot wrap a model that zshard has wrapped: remove it, or in a trainer "
        f"(Accelerate, transformers, Lightning) use zshard's adapter, docs/accelerate.md. {instead}"
    )


def _refuse_ddp() -> NoReturn:
    _refuse("DistributedDataParallel", 'For its behaviour, use FSDP(model, strategy="no_shard")')


class NoWrappers(dict[Any, Any]):
    """The entries of torch's composable functions, such as checkpoint(), for a module, by function.
    fully_shard() and replicate() enter themselves here before they change anything."""

    def setdefault(self, function: Any, state: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("fully_shard", "replicate"):
            _refuse(f"torch's {name}()", "To choose units, pass FSDP(auto_wrap_policy=...)")
        return super().setdefault(function, state)


def refuse_wrappers_around(module: nn.Module) -> None:
    """Make torch's fully_shard() and replicate() of a unit's module raise TypeError."""
    attributes = vars(module)
    attributes[STATE_KEY] = NoWrappers(attributes.get(STATE_KEY, ()))


class NoDdp:
    """Replaces the names that DDP must ignore. DDP and Lightning read them from a model before they
    broadcast its parameters."""

    def __iter__(self) -> Iterator[str]:
        _refuse_ddp()

    def __contains__(self, name: object) -> bool:
        _refuse_ddp()


def refuse_ddp_around() -> None:
    """Raise TypeError in a forward of DDP over shards: it asks only the module that it wraps for
    names to ignore, and this one contains the sharded model."""
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is not None and any(map(_core.is_shard, ddp._module_parameters)):
        _refuse_ddp()


def check_zero_redundancy(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError for a ZeroRedundancyOptimizer over sharded parameters."""
    if any(_core.is_shard(param) for group in optimizer.param_groups for param in group["params"]):
        raise TypeError(
            "ZeroRedundancyOptimizer cannot step parameters that zshard has sharded: pass them to "
            "the optimizer itself, such as torch.optim.AdamW, whose state is sharded then"
        )


FLATTENING = ("_flatten_as_ptr", "_flatten")
"""Functions of safetensors.torch that save() and save_file() call; the second before 0.8."""


def install_safetensors() -> None:
    """Make safetensors refuse shards, if it is installed. Idempotent."""
    try:
        library = importlib.import_module("safetensors.torch")
    except ImportError:
        return
    for name in FLATTENING:
        flatten = getattr(library, name, None)
        if flatten is not None and not hasattr(flatten, "__wrapped__"):
            setattr(library, name, functools.wraps(flatten)(functools.partial(_flatten, flatten)))


def _flatten(flatten: Callable[..., Any], tensors: object, *args: object, **kwargs: object) -> Any:
    if parts := slices_among([tensors]):
        raise ShardError(written_to_file("a safetensors file", parts[0]))
    return flatten(tensors, *args, **kwargs)
