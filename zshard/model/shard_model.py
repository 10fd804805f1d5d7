"""Shard a model: one object that knows its units and parameters, and five calls on it.

Plan, agree, check memory, build, publish. Nothing changes until every rank has found that it can
continue, so an error leaves the module unchanged. A unit's module stays the same object with the
same parameters and names; its class becomes a subclass of (FSDP, its class).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zshard import _core
from zshard.guard.outside import refuse_wrappers_around, tell_of_barriers
from zshard.model.own_names import properties_in_place
from zshard.optim.hooks import know_again
from zshard.optim.shared_state import meet
from zshard.options import option_facts
from zshard.precision import cast_buffers, drop_root_casts, install_casts, install_kept
from zshard.ranks.agreement import PublicCall, check_agreement, on_all_ranks, told_to_all_ranks
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
    Options,
    State,
    hook_forward,
    is_unit,
    state_of,
    units_of,
)
from zshard.wrap.build import make_engine, make_unit, parts_to_guard, plan_forward
from zshard.wrap.initial_values import InitialValues, check_unit, facts_of
from zshard.wrap.late_parameters import watch
from zshard.wrap.meta import Init, Materializer, check_in_forward
from zshard.wrap.tree import UnitSpec

_HALF = "_zshard_half"  # marks a model while it is being sharded, or after that failed


Given = tuple[str | NcclOptions | None, float | None, str]
"""What a script asks of transports: which, a timeout in seconds, and the device."""


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

    @property
    def group_given(self) -> dist.ProcessGroup | None:
        """The process group to shard over, as the script passed it; None: the default."""
        if self.device_mesh is not None:
            return self.device_mesh.get_group(-1 if self.device_mesh.ndim > 1 else None)
        pair = self.process_group
        return pair[0] if isinstance(pair, tuple) else pair


def crosses_hosts(comm: _core.Comm) -> bool:
    """Return whether the ranks that gather from each other are on several (equal) hosts."""
    return comm.per_host > 0


@PublicCall("FSDP()")
def shard_model(
    base: type[nn.Module],
    module: nn.Module,
    planned: list[tuple[UnitSpec, Options]],
    settings: FsdpSettings,
) -> None:
    """Shard a model in place. Collective.

    base: FSDP, from which the class of each unit derives. planned: the units with their options,
    children first, the root last.
    """
    model = ShardingPlan(base, module, planned)
    model.agree(settings)
    model.check_memory(settings)
    model.build(settings)
    model.publish(settings)


@dataclass(eq=False)
class ShardingPlan:
    """A model that is being sharded, or a copy of one.

    names: of all its modules, parents first. inner: its units of earlier calls, parents first.
    """

    base: type[nn.Module]
    module: nn.Module
    planned: list[tuple[UnitSpec, Options]]
    names: dict[nn.Module, str] = field(init=False)
    inner: list[tuple[nn.Module, State]] = field(init=False)
    comms: Comms = field(init=False)
    group_given: dist.ProcessGroup | None = None
    is_alone: bool = False
    sharing: Any = None  # host_limits.Sharing, with a limit

    def __post_init__(self) -> None:
        self.names = {each: name for name, each in self.module.named_modules()}
        self.inner = [(each, state_of(each)) for each in self.names if is_unit(each)]

    @property
    def options(self) -> Options:
        """The options of the root, which apply to the model."""
        return self.planned[-1][1]

    @property
    def joined(self) -> list[tuple[nn.Module, State]]:
        """The inner units that become part of the model: those over the same ranks."""
        return [(each, state) for each, state in self.inner if not state.is_apart(self.comms)]

    @property
    def modules_apart(self) -> set[nn.Module]:
        """The modules of the other inner units."""
        apart = [each for each, state in self.inner if state.is_apart(self.comms)]
        return {part for each in apart for part in each.modules()}

    # --- agree ------------------------------------------------------------------------------------

    def agree(self, settings: FsdpSettings) -> None:
        """Choose the transports, once all ranks agree on the model and can shard it."""
        given = settings.transport, settings.timeout, settings.device
        check_settings(*given)
        groups = resolve_groups(settings.process_group, settings.device_mesh, self.options.strategy)
        given = settings.transport, self._timeout(groups.world, settings.timeout), settings.device
        comm, given = self._comm_for(groups.world, given)
        specs = [spec for spec, _ in self.planned]
        facts = option_facts(self.options)
        facts += facts_of(self.module, specs, self.options, not settings.from_rank_0)
        if self.options.micro_batches:
            facts.append(("OMP_NUM_THREADS", str(torch.get_num_threads())))
        check_agreement(comm, facts)
        check_wire_over(comm, self.options.wire)
        inner = [state for _, state in self.inner]
        held = {id(ref.param) for spec in specs for ref in spec.params}
        held |= {id(param) for state in inner for param in state.unit.params}
        ours = [each for _, each in self.planned]
        theirs = [each.options for each in inner]
        for each in EXTENSIONS:
            each.check_model(self.module, ours, theirs, held, settings.device)
        self.comms = self._kept_comms(comms_for(groups, self.options.strategy, comm, given))
        with on_all_ranks(comm):
            for spec in specs:  # these have their own error
                check_unit(spec)
                class_for(self.base, type(spec.module))
        keep = self.options.keep
        if keep is None and not crosses_hosts(self.comms.shard_group):
            keep = 0  # within one host, a gather is cheap
        self.planned = [(spec, each._replace(keep=keep)) for spec, each in self.planned]
        self.group_given = settings.group_given
        by_default = settings.process_group is None and settings.device_mesh is None
        self.is_alone = by_default and not dist.is_initialized()

    def _timeout(self, group: Group | None, asked: float | None) -> float | None:
        """Return the timeout to ask for: a model has one, so units of earlier calls decide. Raises
        ValueError for another one than theirs."""
        theirs = next((s.comms.all for _, s in self.inner if group_of(s.comms.all) is group), None)
        if theirs is None or group is None:
            return asked
        if asked not in (None, theirs.timeout):
            raise ValueError(
                f"FSDP(timeout={asked}): a module inside was wrapped with a timeout of "
                f"{theirs.timeout:g} s, and a model has one: pass the same to both"
            )
        return theirs.timeout

    def _comm_for(self, group: Group | None, given: Given) -> tuple[_core.Comm, Given]:
        """Return the transport of all ranks, and what to ask of those of parts of them."""
        comm = comm_for(group, *given)
        if self.options.micro_batches == 0 or given[2] != CPU:
            return comm, given
        if comm.transport == "hosts" and given[0] != "hosts":  # it adds gradients by host
            given = ("c10d", *given[1:])
            comm = comm_for(group, *given)
        for each in EXTENSIONS:
            each.check_transport(self.options, comm, given[0])
        return comm, given

    def _kept_comms(self, comms: Comms) -> Comms:
        """Whether to keep copies between steps is one choice for the entire model: inner units that
        keep them decide."""
        for _, state in self.inner if comms.replica_group is None else ():
            if state.comms.replica_group is not None and state.comms.all is comms.all:
                return state.comms
        return comms

    # --- check memory -----------------------------------------------------------------------------

    def check_memory(self, settings: FsdpSettings) -> None:
        """Raise MemoryError on all ranks if the model does not fit on one of them."""
        for ref in (ref for spec, _ in self.planned for ref in spec.params):
            for each in EXTENSIONS:
                each.settle(ref)
        limit = self.options.limit
        if limit is not None:
            from zshard.memory.fits import check_fits

            self.sharing = check_fits(
                self.module, self.planned, self.comms, self.joined, limit, settings.device
            )

    # --- build ------------------------------------------------------------------------------------

    def build(self, settings: FsdpSettings) -> None:
        """Make the units, children first, each with its values; then share buffers."""
        everyone = self.comms.all
        source = everyone if settings.from_rank_0 and everyone.world > 1 else None
        materializer = Materializer(self.module, settings.init, settings.ignored)
        initial = InitialValues(self.module, materializer, source, settings.device)
        for comm in {id(each): each for each in self.comms if each is not None}.values():
            comm.align()  # an earlier FSDP() may have failed after some ranks had made a unit
        with on_all_ranks(everyone):
            engine = make_engine(self.module, self.comms, self.options)
        made = []
        with _begun(self.module):
            for spec, options in self.planned:
                with on_all_ranks(everyone):
                    initial.make(spec)
                with told_to_all_ranks(everyone):
                    initial.give(spec)
                with on_all_ranks(everyone):
                    made.append(self.make_unit(engine, spec, options))
        self.take_in(engine)
        with on_all_ranks(everyone):
            self.plan_step(engine, made)
        with told_to_all_ranks(everyone):
            initial.give_buffers(settings.ignored | self.modules_apart)
        check_in_forward(self.module, materializer.left_out)

    def make_unit(self, engine: _core.Engine, spec: UnitSpec, options: Options) -> _core.Unit:
        """Turn a module into a unit: hook it, guard it and change its class."""
        module, unit = spec.module, make_unit(engine, spec, options)
        state = State(unit, self.comms, options, self.group_given, self.is_alone)
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
        casts = install_casts(module, options.precision, module is self.module)
        state.note_hooks(module, casts)
        install_kept({owner for ref in spec.params for owner, _ in ref.owners}, options.precision)
        if unit.is_hooked and not unit.replicated:
            for part in parts_to_guard(spec, self.module if len(self.planned) > 1 else None):
                state.note_hooks(part, hook_forward(part, unit))
        if not unit.replicated:
            unit.guard()
        return unit

    def take_in(self, engine: _core.Engine) -> None:
        """Turn earlier outermost units into inner ones. From now on their names start at this root,
        FSDP1's root option no longer casts their arguments, and the root measures their steps."""
        for _, state in self.joined:
            engine.adopt(state.unit)
        for module, state in self.inner:
            state.spare = None
            state.attached.clear()
            dropped = drop_root_casts(module, state.options.precision)
            state.hooks = [hook for hook in state.hooks if hook[1] not in dropped]
            state.rename(self.names[module])

    def plan_step(self, engine: _core.Engine, made: Sequence[_core.Unit]) -> None:
        """Report the order of the units to the engine, and reserve the memory of a step."""
        pairs = [(spec, unit) for (spec, _), unit in zip(self.planned, made, strict=True)]
        inner = [(module, state.unit, state.unit) for module, state in self.joined]
        plan_forward(engine, self.module, pairs, inner)
        engine.reserve()

    # --- publish ----------------------------------------------------------------------------------

    def publish(self, settings: FsdpSettings) -> None:
        """Install the watchers of the model, and let other ranks use its shards."""
        module, limit = self.module, self.options.limit
        if self.comms.all.world > 1:
            watch(module, settings.ignored)
        cast_buffers(module, self.options.precision, settings.ignored)
        if settings.buffers_in_forward:
            sync_buffers(module, settings.buffers_in_forward)
        for each in EXTENSIONS:
            each.finish(module)
        if limit is not None or self.options.keep is None:
            from zshard.memory.spare import Spare, watch_first_steps

            watch_first_steps(module, limit, self.sharing, settings.device)
            if self.options.keep is None:
                state_of(module).spare = Spare(module, limit, self.sharing)
        introduce(module)
        engine = state_of(module).unit.engine
        engine.begin_write()  # the values are complete
        engine.end_write()


@contextlib.contextmanager
def _begun(module: nn.Module) -> Iterator[None]:
    """Context manager that marks a model while FSDP() takes its parameters apart."""
    module.__dict__[_HALF] = True
    yield
    del module.__dict__[_HALF]


def refuse_half(module: nn.Module) -> None:
    """Raise RuntimeError if an earlier FSDP() has left a model half sharded."""
    if _HALF in module.__dict__:
        raise RuntimeError(
            f"an earlier FSDP() of this {type(module).__name__} failed after it had begun to "
            "shard it: build the model again, on all ranks"
        )


# --- parts of a model ----------------------------------------------------------------------------


_classes: dict[tuple[type[nn.Module], type[nn.Module]], type[Any]] = {}


def class_for(base: type[nn.Module], original: type[nn.Module]) -> type[Any]:
    """Return the class of a unit whose module is of class `original`; base: FSDP. Raises TypeError
    if no such class can exist."""
    if (base, original) not in _classes:

        def make_plain(cls: type, *args: object, **kwargs: object) -> Any:
            """Return the result of type(model)(...), as a container creates it when it is
            sliced."""
            return original(*args, **kwargs)

        # Libraries look classes up by __name__ (transformers: is this a causal language model?).
        name, shown = original.__name__, f"FSDP{original.__qualname__}"
        names = {"__module__": original.__module__, "__qualname__": shown, "__new__": make_plain}
        names |= {MADE: True, **properties_in_place(base, original)}
        for each in EXTENSIONS:
            names |= each.methods(original)
        _classes[base, original] = type(name, (base, original), names)
    return _classes[base, original]


def introduce(module: nn.Module) -> None:
    """Make a new model known to other ranks, which may evaluate with its shards after its next
    write."""
    state = state_of(module)
    meet(module, state.comms.shards)
    know_again(state.unit)
    tell_of_barriers(state)


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
    set_buffers()  # a rank without data takes part in join() before a forward of its own


def broadcast_buffers(module: nn.Module) -> None:
    """Broadcast buffers as the next training forward would, for evaluations before it.
    Collective."""
    state = state_of(module)
    if state.sync_buffers and state.comms.all.world > 1:
        state.unit.engine.broadcast_buffers()
