"""The state that zshard stores about a module that is a unit.

It is in the module's __dict__, under one name. Walking the modules finds a model's units; there is
no other list of them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from zshard import _core
from zshard.offload import Offload
from zshard.precision import Precision
from zshard.ranks.transports import Comms, ranks_of
from zshard.ranks.wire import Wire
from zshard.strategy import ShardingStrategy

_M = TypeVar("_M", bound=nn.Module)

ATTRIBUTE = "_zshard_state"

MADE = "_zshard_made"
"""An attribute of the classes of units, which are no subclasses to a model."""

BufferSync = Literal[False, True, "training"]
"""In which forwards buffers are broadcast from rank 0: in none, in all, or in those with gradients,
which all ranks run."""

OnNonfinite = Literal["raise", "skip"] | None
MemoryLimit = int | str | None
"""Bytes that zshard may allocate on a rank, "auto", or None for no check."""

# A module with one of zshard's hooks, and the hook's id.
Hook = tuple["weakref.ref[nn.Module]", int]


class Prefetch(NamedTuple):
    """Units to prefetch in forward and in backward: the arguments of Engine.set_prefetch."""

    forward: int = 1
    backward: int = 1


class Options(NamedTuple):
    """The options that a unit was wrapped with."""

    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    precision: Precision = Precision()
    prefetch: Prefetch = Prefetch()
    offload: Offload | None = None
    limit: MemoryLimit = "auto"
    # Bytes of full parameters that stay gathered from forward to backward; None: decided after the
    # second step. The root's applies to the model.
    gathered: int | None = 0
    wire: Wire = Wire()
    extras: tuple[tuple[str, Any], ...] = ()  # what extras have made of their arguments, by name

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step with deterministic="any-world"; 0 without it."""
        return dict(self.extras).get("micro_batches") or 0


class Measurement(Protocol):
    """Decides what stays gathered: memory/spare.py's Spare."""

    is_open: bool  # not decided yet

    def note_step(self) -> None:
        """Note a step of the model, which all ranks make."""

    def like(self, module: nn.Module) -> Measurement:
        """Return the same for a copy of the model."""


class Summons(NamedTuple):
    """A summon_full_params() that is open on all ranks."""

    writeback: bool
    rank0_only: bool


class StateDictForm(NamedTuple):
    """The form of state_dict() of units.

    rank0_only: other ranks get an empty dict. optim_rank0_only: the same for state dicts of the
    model's optimizers. settings: the object that the script passed to
    set_state_dict_type(), which get_state_dict_type() returns; None: it passed none.
    """

    rank0_only: bool = False
    optim_rank0_only: bool = False
    settings: Any = None


@dataclass(eq=False)
class ModelContext:
    """The record of a sharded model, shared by all of its units."""

    replaced: str = ""  # the context in which the parameters have other values; see units/moment.py
    is_kept: bool = False  # by a zshard.Keep, which alone writes to it between passes
    is_compared: bool = False  # note_values() of optim/step_digest.py
    knows_of_writes: bool = False  # units/returned.py has warned
    n_unhooked: int = 0  # its running forwards that the core does not track, as nothing is sharded
    thread: int = 0  # that has made it, if ranks read each other's shards: its barriers count
    first_step: Callable[[torch.optim.Optimizer], None] | None = None  # checks memory before it
    spare: Measurement | None = None  # None: not measured
    norm: torch.Tensor | None = None  # before the last clipping
    buffer: torch.Tensor | None = None  # for copies of its values that a thread writes to files
    attached: dict[str, Any] = field(default_factory=dict)  # what extensions keep, by their names


@dataclass(eq=False)
class State:
    """The state of a unit, stored on its module.

    Nothing in it refers back to the module: a dropped model frees its memory at once, not at the
    next garbage collection.
    """

    unit: _core.Unit
    comms: Comms
    options: Options
    model: ModelContext
    group_given: dist.ProcessGroup | None = None  # the shard group, as the script passed it
    is_alone: bool = False  # there was no process group
    hooks: list[Hook] = field(default_factory=list)  # on the module, and on its submodules
    form: StateDictForm = field(default=StateDictForm())
    summons: list[Summons] = field(default_factory=list)  # the innermost last
    whole_grads: bool = False  # within summon_full_params(with_grads=True)
    optimizer_peak: int = 0  # bytes, as memory() has seen them
    names: list[str] = field(init=False)  # of the parameters
    peers: object = None  # shared_state.ModelRecord: what the ranks can read of optimizer state
    peers_seen: list[weakref.ref[Any]] = field(default_factory=list)  # for Parts, which live longer
    sync_buffers: BufferSync = False  # the root's: broadcast from rank 0 at the start of a forward
    n_calls: int = 0  # running forwards of the module, which end even after an exception
    sizes_read: set[int] = field(default_factory=set)  # parameters whose shard's size a script read

    def __post_init__(self) -> None:
        self.names = [str(self.unit.param(i)["name"]) for i in range(self.unit.n_params)]

    def set_peers(self, peers: object) -> None:
        """Let the ranks of the unit's model read each other's optimizer state."""
        self.peers, self.peers_seen[:] = peers, [weakref.ref(peers)]

    def is_apart(self, comms: Comms) -> bool:
        """Return whether a nested unit was sharded over other ranks than the model around it, such
        as an expert that each rank has for itself. It remains a separate model."""
        return ranks_of(self.comms.all) != ranks_of(comms.all)

    @property
    def has_replicas(self) -> bool:
        """True if several ranks hold the same values of the unit."""
        return self.unit.replicated or self.comms.all.world > self.comms.shards.world

    def note_hooks(self, module: nn.Module, handles: Iterable[RemovableHandle]) -> list[Hook]:
        """Add hooks on a module, which copies of the model do not get; return them."""
        hooks: list[Hook] = [(weakref.ref(module), handle.id) for handle in handles]
        self.hooks += hooks
        return hooks

    def rename(self, name: str) -> None:
        """Rename the unit and its parameters, which outlive it in Parts."""
        if self.unit.name == name:
            return
        self.unit.name = name
        self.names[:] = [str(self.unit.param(i)["name"]) for i in range(len(self.names))]


@contextlib.contextmanager
def session(units: Iterable[_core.Unit]) -> Iterator[None]:
    """Context manager in which no rank writes to the units' models, so that all reads are of one
    step. As a forward without gradients: over c10d all ranks run it together."""
    with contextlib.ExitStack() as opened:
        for engine in dict.fromkeys(unit.engine for unit in units):
            engine.open()
            opened.callback(engine.close)
        yield


@contextlib.contextmanager
def writing(units: Iterable[_core.Unit]) -> Iterator[None]:
    """Context manager in which the shards of the units' models may be written: no peer reads."""
    with contextlib.ExitStack() as begun:
        for engine in dict.fromkeys(unit.engine for unit in units):
            engine.begin_write()
            begun.callback(engine.end_write)  # even after an exception: all ranks count writes
        yield


@contextlib.contextmanager
def unsharded(unit: _core.Unit) -> Iterator[None]:
    """Context manager in which a unit's full parameters can be read, in their own dtype. As a
    forward without gradients: over c10d all ranks run it together. A pinned unit is read as it is,
    with what a script has written to it, and alone."""
    with contextlib.nullcontext() if unit.is_pinned else session([unit]):
        was_full = unit.is_full  # by a running forward, which continues with it
        unit.unshard(True)
        try:
            yield
        finally:
            if not was_full:
                unit.reshard()


def is_unit(module: nn.Module) -> bool:
    """Return whether an FSDP(...) call has made `module` a unit."""
    return ATTRIBUTE in module.__dict__


def state_of(module: nn.Module) -> State:
    """Return the state of a unit's module. Raises TypeError for any other module."""
    state: State | None = module.__dict__.get(ATTRIBUTE)
    if state is None:
        raise TypeError(f"a {type(module).__name__} is no sharded module: pass FSDP(module) itself")
    return state


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, of a unit's module the one that it had before."""
    kind: type[nn.Module] = type(module)
    return kind.__bases__[1] if MADE in vars(kind) else kind


def units_of(module: nn.Module) -> Iterator[tuple[nn.Module, State]]:
    """Yield the units at and below `module`, parents before children, in module order."""
    for each in module.modules():
        if is_unit(each):
            yield each, state_of(each)


def without_memory(
    param: nn.Parameter, shape: tuple[int, ...], device: torch.device | str
) -> nn.Parameter:
    """Return a parameter like `param` with another shape and device, with zeros that take no
    memory."""
    data = torch.zeros((), dtype=param.dtype, device=device).expand(shape)
    return like(param, data)


def like(param: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """Return a parameter with other memory that has the attributes of `param`, and its class if a
    script or a library (bitsandbytes, say) has defined that."""
    kind = type(param)
    if kind is nn.Parameter or kind.__module__.startswith("zshard."):
        copied = nn.Parameter(data, requires_grad=param.requires_grad)
    else:
        copied = torch.Tensor._make_subclass(kind, data, param.requires_grad)
    vars(copied).update(vars(param))
    return copied


def hook_forward(module: nn.Module, unit: _core.Unit) -> list[RemovableHandle]:
    """Register the hooks that unshard the unit during the forward of `module`."""
    return [
        module.register_forward_pre_hook(unit.pre_forward, prepend=True),
        module.register_forward_hook(unit.post_forward, always_call=True),
    ]


def modules_of(kind: type[_M], module: nn.Module, root_only: bool) -> list[_M]:
    """Return the modules of class `kind` at and below `module`, parents first; with `root_only`
    those that are not inside another one."""
    units = [m for m in module.modules() if isinstance(m, kind)]
    if not root_only:
        return units
    inner = {id(child) for unit in units for child in unit.modules() if child is not unit}
    return [unit for unit in units if id(unit) not in inner]


# --- names without the prefixes of wrappers -------------------------------------------------------
#
# A checkpoint describes a model, not how it is run. torch.compile(), activation checkpointing and
# DDP each wrap a module in another one, which adds a component to its names, though not always in
# state_dict(). So saved names omit these components, and loading restores those that
# load_state_dict() expects.

_COMPILED = "_orig_mod"  # in torch.compile(module)
_CHECKPOINTED = "_checkpoint_wrapped_module"  # load_state_dict() inserts this one itself
_COMPONENTS = {_COMPILED: "OptimizedModule", _CHECKPOINTED: "ActivationWrapper"}
"""The components, with the classes of their wrappers."""


def plain_name(name: str) -> str:
    """Return a name without the components that wrappers add."""
    if not any(part in name for part in _COMPONENTS):
        return name
    return ".".join(part for part in name.split(".") if part not in _COMPONENTS)


def wrapped_child(module: nn.Module) -> str | None:
    """Return the name of the child that torch.compile() or activation checkpointing has put the
    module around; None for any other module."""
    kinds = {kind.__name__ for kind in type(module).__mro__}  # their modules may not be imported
    return next((part for part, kind in _COMPONENTS.items() if kind in kinds), None)


def stray_component(module: nn.Module) -> str | None:
    """Return the name of a child that checkpoints would take for a wrapper's; None without one."""
    return next(
        (p for p in _COMPONENTS if p in module._modules and p != wrapped_child(module)), None
    )


def bare(model: nn.Module) -> nn.Module:
    """Return the model that was passed to DDP and torch.compile(). Stops at a unit."""
    while ATTRIBUTE not in vars(model):
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif wrapped_child(model) == _COMPILED:
            model = model.get_submodule(_COMPILED)
        else:
            break
    return model


def wanted_by(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of plain names under the names that `model`.load_state_dict() expects."""
    wanted = dict(state)
    for path, module in model.named_modules(remove_duplicate=False):  # from outside to inside
        if _COMPILED in module._modules:
            kept = [part for part in path.split(".") if part and part != _CHECKPOINTED]
            prefix = "".join(f"{part}." for part in kept)
            wanted = {
                f"{prefix}{_COMPILED}.{name[len(prefix) :]}" if name.startswith(prefix) else name: v
                for name, v in wanted.items()
            }
    return wanted
