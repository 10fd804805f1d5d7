"""Shard a model: one object that knows its units and parameters, and the calls on it.

Plan, agree, check memory, build, publish. Nothing changes until every rank has found that it can
continue, so an error leaves the module unchanged. A unit's module stays the same object with the
same parameters and names; its class becomes a subclass of (FSDP, its class).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zshard import _core
from zshard._logger import log
from zshard.guard.outside import refuse_wrappers_around
from zshard.memory.fits import check_fits
from zshard.memory.spare import Spare, watch_first_steps
from zshard.model.own_names import properties_in_place
from zshard.optim.hooks import know_again
from zshard.optim.shared_state import share_state
from zshard.options import option_facts
from zshard.precision import Precision, cast_buffers, drop_root_casts, install_casts, install_kept
from zshard.ranks.agreement import (
    PublicCall,
    check_agreement,
    on_all_ranks,
    on_any_rank,
    told_to_all_ranks,
)
from zshard.ranks.devices import CPU
from zshard.ranks.groups import Group, resolve_groups
from zshard.ranks.nccl import NcclOptions
from zshard.ranks.transports import Comms, check_settings, comm_for, comms_for, group_of
from zshard.ranks.wire import check_wire_over
from zshard.state.module import attach, attach_replicated
from zshard.units.extensions import EXTENSIONS
from zshard.units.shards import remember_parts
from zshard.units.units import (
    ATTRIBUTE,
    MADE,
    BufferSync,
    ModelContext,
    State,
    hook_forward,
    is_unit,
    state_of,
    units_of,
)
from zshard.wrap.build import (
    InitialValues,
    check_unit,
    facts_of,
    make_engine,
    make_unit,
    plan_forward,
)
from zshard.wrap.late_parameters import watch
from zshard.wrap.meta import Init, Materializer, check_in_forward
from zshard.wrap.tree import UnitSpec

_HALF = "_zshard_half"  # marks a model while it is being sharded, or after that failed


class FsdpSettings(NamedTuple):
    """FSDP()'s arguments, besides units and their options.

    init: initializes a module on the meta device; None: its reset_parameters(). from_rank_0: take
    rank 0's values. buffers_in_forward: also broadcast its buffers in forwards. ignored: modules
    whose values stay as they are.
    """

    device: str
    process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None
    device_mesh: DeviceMesh | None
    transport: str | NcclOptions | None
    timeout: float | None
    init: Init | None
    from_rank_0: bool
    buffers_in_forward: BufferSync
    ignored: set[nn.Module]


def crosses_hosts(comm: _core.Comm) -> bool:
    """Return whether the ranks that gather from each other are on several (equal) hosts."""
    return comm.per_host > 0


@PublicCall("FSDP()")
def shard_model(
    base: type[nn.Module], module: nn.Module, specs: list[UnitSpec], settings: FsdpSettings
) -> None:
    """Shard a model in place. Collective.

    base: FSDP, from which the class of each unit derives. specs: the units, children first, the
    root last.
    """
    model = ShardingPlan(base, module, specs)
    model.agree(settings)
    limit = model.options.limit
    for ref in (ref for spec in specs for ref in spec.params):
        for each in EXTENSIONS:
            each.prepare(ref)
    if limit is not None:
        sharing = check_fits(module, specs, model.comms, model.joined, settings.device)
    model.build(settings)
    if model.comms.all.world > 1:
        watch(module, settings.ignored)
    if model.options.precision.buffers is not None:
        cast_buffers(module, model.options.precision, settings.ignored)
    if settings.buffers_in_forward:
        sync_buffers(module, settings.buffers_in_forward)
    for each in EXTENSIONS:
        each.finish(module)
    if limit is not None:
        if settings.device == CPU:
            watch_first_steps(module, limit, sharing)
        if model.options.gathered is None:
            model.context.spare = Spare(module, limit, sharing)
    introduce(module)
    engine = state_of(module).unit.engine
    engine.begin_write()  # the values are complete
    engine.end_write()


@dataclass(eq=False)
class ShardingPlan:
    """A model that is being sharded, or a copy of one.

    names: of all its modules, parents first. inner: its units of earlier calls, parents first;
    joined: those that become part of the model, as they are over the same ranks. options: the
    root's, which apply to the model.
    """

    base: type[nn.Module]
    module: nn.Module
    specs: list[UnitSpec]
    names: dict[nn.Module, str] = field(init=False)
    inner: list[tuple[nn.Module, State]] = field(init=False)
    joined: list[tuple[nn.Module, State]] = field(default_factory=list)
    comms: Comms = field(init=False)
    context: ModelContext = field(default_factory=ModelContext)
    group_given: dist.ProcessGroup | None = None
    is_alone: bool = False

    def __post_init__(self) -> None:
        self.names = {each: name for name, each in self.module.named_modules()}
        self.inner = [(each, state_of(each)) for each in self.names if is_unit(each)]
        self.options = self.specs[-1].options

    # --- agree ------------------------------------------------------------------------------------

    def agree(self, settings: FsdpSettings) -> None:
        """Choose the transports, once all ranks agree on the model and can shard it."""
        asked, timeout, device = settings.transport, settings.timeout, settings.device
        check_settings(asked, timeout, device)
        options, mesh, pair = self.options, settings.device_mesh, settings.process_group
        groups = resolve_groups(pair, mesh, options.strategy)
        inner = [state for _, state in self.inner]
        if inner:
            timeout = _timeout_of(inner, groups.world, timeout)
        comm = comm_for(groups.world, asked, timeout, device)
        if options.micro_batches and device == CPU:
            if comm.transport == "hosts" and asked != "hosts":  # it adds gradients by host
                log.common(comm.rank, "transport hosts refused: it adds gradients by host")
                asked = "c10d"
                comm = comm_for(groups.world, asked, timeout, device)
            for each in EXTENSIONS:
                each.check_transport(options, comm, asked)
        facts = option_facts(options)
        facts += facts_of(self.module, self.specs, not settings.from_rank_0)
        if options.micro_batches:
            facts.append(("OMP_NUM_THREADS", str(torch.get_num_threads())))
        check_agreement(comm, facts)
        check_wire_over(comm, options.wire)
        held = {id(ref.param) for spec in self.specs for ref in spec.params}
        held |= {id(param) for state in inner for param in state.unit.params}
        of_specs, of_inner = ([each.options for each in some] for some in (self.specs, inner))
        for each in EXTENSIONS:
            each.check_model(self.module, of_specs, of_inner, held, device)
        self.comms = comms_for(groups, options.strategy, comm, (asked, timeout, device))
        for state in inner if self.comms.replica_group is None else ():
            # Whether to keep copies between steps is one choice for the entire model.
            if state.comms.replica_group is not None and state.comms.all is self.comms.all:
                self.comms = state.comms
                break
        self.joined = [each for each in self.inner if not each[1].is_apart(self.comms)]
        with on_all_ranks(comm):
            for spec in self.specs:  # these have their own error
                check_unit(spec)
                class_for(self.base, type(spec.module))
        if options.gathered is None and not crosses_hosts(self.comms.shard_group):
            for spec in self.specs:  # "auto": within one host a gather is cheap
                spec.options = spec.options._replace(gathered=0)
            self.options = self.specs[-1].options
        self.is_alone = pair is None and mesh is None and not dist.is_initialized()
        self.group_given = pair[0] if isinstance(pair, tuple) else pair
        if mesh is not None:
            self.group_given = mesh.get_group(-1 if mesh.ndim > 1 else None)

    # --- build ------------------------------------------------------------------------------------

    def build(self, settings: FsdpSettings) -> None:
        """Make the units, children first, each with its values; then share buffers."""
        everyone, module = self.comms.all, self.module
        initial = InitialValues(module, everyone, settings.device, settings.from_rank_0)
        is_on_meta = any(each.is_meta for each in (*module.parameters(), *module.buffers()))
        materializer = None
        if on_any_rank(everyone, is_on_meta):
            materializer = Materializer(module, settings.init, settings.ignored)
        else:
            with told_to_all_ranks(everyone):
                initial.compare(self.specs)
        for comm in {id(each): each for each in self.comms if each is not None}.values():
            comm.align()  # an earlier FSDP() may have failed after some ranks had made a unit
        with on_all_ranks(everyone):
            engine = make_engine(module, self.comms, self.options)
        units = []
        module.__dict__[_HALF] = True
        if materializer is None and initial.is_shared:  # no unit needs the other ranks
            with on_all_ranks(everyone):
                for spec in self.specs:
                    initial.give(spec)
                    units.append(self.make_unit(engine, spec))
        for spec in self.specs[len(units) :]:
            if materializer is not None:
                with on_all_ranks(everyone):
                    materializer.up_to(spec.module)
            with told_to_all_ranks(everyone):
                initial.give(spec)
            with on_all_ranks(everyone):
                units.append(self.make_unit(engine, spec))
        del module.__dict__[_HALF]
        self.take_in(engine)
        with on_all_ranks(everyone):
            self.plan_step(engine, units)
        apart = [each for each, state in self.inner if state.is_apart(self.comms)]
        with told_to_all_ranks(everyone):
            initial.give_buffers({*settings.ignored, *apart})
        if materializer is not None:
            check_in_forward(module, materializer.left_out)

    def make_unit(self, engine: _core.Engine, spec: UnitSpec) -> _core.Unit:
        """Turn a module into a unit: hook it, guard it and change its class."""
        module, options, unit = spec.module, spec.options, make_unit(engine, spec)
        state = State(unit, self.comms, options, self.context, self.group_given, self.is_alone)
        remember_parts(state)
        if unit.is_hooked:
            state.note_hooks(module, hook_forward(module, unit))
            if unit.replicated:
                attach_replicated(spec)
            else:
                attach(state, spec)
        module.__dict__[ATTRIBUTE] = state
        module.__class__ = class_for(self.base, type(module))
        refuse_wrappers_around(module)
        if options.precision != Precision():
            casts = install_casts(module, options.precision, module is self.module)
            state.note_hooks(module, casts)
            owners = {owner for ref in spec.params for owner, _ in ref.owners}
            install_kept(owners, options.precision)
        if not unit.replicated:
            for part in spec.parts if unit.is_hooked else ():
                state.note_hooks(part, hook_forward(part, unit))
            unit.guard()
        return unit

    def take_in(self, engine: _core.Engine) -> None:
        """Turn earlier outermost units into inner ones. From now on their names start at this root,
        FSDP1's root option no longer casts their arguments, and the root measures their steps."""
        for _, state in self.joined:
            engine.adopt(state.unit)
        for module, state in self.inner:
            state.model.spare = None
            state.model.attached.clear()
            if any(state is each for _, each in self.joined):
                state.model = self.context
            dropped = drop_root_casts(module, state.options.precision)
            state.hooks = [hook for hook in state.hooks if hook[1] not in dropped]
            state.rename(self.names[module])

    def plan_step(self, engine: _core.Engine, units: Sequence[_core.Unit]) -> None:
        """Report the order of the units to the engine, and reserve the memory of a step."""
        inner = [(module, state.unit, state.unit) for module, state in self.joined]
        plan_forward(engine, self.module, list(zip(self.specs, units, strict=True)), inner)
        engine.reserve()


def _timeout_of(inner: list[State], group: Group | None, asked: float | None) -> float | None:
    """Return the timeout to ask for: that of units inside. Raises ValueError for another one."""
    comm = next((s.comms.all for s in inner if group_of(s.comms.all) is group), None)
    if comm is None or group is None:
        return asked
    if asked not in (None, comm.timeout):
        raise ValueError(
            f"FSDP(timeout={asked}): a module inside has a timeout of {comm.timeout:g} s: pass the "
            "same to both"
        )
    return comm.timeout


def refuse_half(module: nn.Module) -> None:
    """Raise RuntimeError if an earlier FSDP() has left a model half sharded."""
    if _HALF in module.__dict__:
        raise RuntimeError(
            f"an earlier FSDP() has left this {type(module).__name__} half sharded: build the "
            "model again, on all ranks"
        )


# --- parts of a model ----------------------------------------------------------------------------


def _class_for(base: type[nn.Module], original: type[nn.Module]) -> type[Any]:
    """Return the class of a unit whose module is of class `original`; base: FSDP. Raises TypeError
    if no such class can exist."""

    def make_plain(cls: type, *args: object, **kwargs: object) -> Any:
        """Return the result of type(model)(...), as a container creates it when it is sliced."""
        return original(*args, **kwargs)

    # Libraries look classes up by __name__ (transformers: is this a causal language model?).
    name, shown = original.__name__, f"FSDP{original.__qualname__}"
    names = {"__module__": original.__module__, "__qualname__": shown, "__new__": make_plain}
    names |= {MADE: True, **properties_in_place(base, original)}
    for each in EXTENSIONS:
        names |= each.methods(original)
    return type(name, (base, original), names)


class_for: Callable[[type, type], type[Any]] = functools.cache(_class_for)


def introduce(module: nn.Module) -> None:
    """Make a new model known to other ranks, which may evaluate with its shards."""
    state = state_of(module)
    share_state(module, state.comms.shards)
    know_again(state.unit)
    if state.comms.shard_group.transport == "shm":
        state.model.thread = threading.get_ident()


def sync_buffers(module: nn.Module, when: BufferSync) -> None:
    """Broadcast a model's buffers from rank 0 at the start of its forwards. A script may replace
    buffers, so each pass broadcasts the modules' current ones."""
    state = state_of(module)
    state.sync_buffers = when
    if state.comms.all.world == 1:
        return
    root, engine = weakref.ref(module), state.unit.engine
    comms, in_training = state.comms, when == "training"

    def set_buffers() -> None:
        model = root()
        if model is not None:
            inner = [unit for unit, each in units_of(model) if each.is_apart(comms)]
            apart = {id(buffer) for unit in inner for buffer in unit.buffers()}
            engine.sync_buffers([b for b in model.buffers() if id(b) not in apart], in_training)

    for _, each in units_of(module):
        if not each.is_apart(comms):
            each.unit.buffers = set_buffers
    set_buffers()  # broadcast_buffers() may come before a forward


def broadcast_buffers(module: nn.Module) -> None:
    """Broadcast buffers as the next training forward would. Collective."""
    state = state_of(module)
    if state.sync_buffers and state.comms.all.world > 1:
        state.unit.engine.broadcast_buffers()
