"""`FSDP(module)`: the one entry. It wraps a module in place and hands the work to the C core.

The one idea: the module stays the same object with the same parameters and names; its class is
swapped to a subclass of (FSDP, its class), and two C callables become its forward hooks. Everything
that happens per step happens behind those hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zshard import _core
from zshard._additions import watch
from zshard._agree import check_agreement
from zshard._arguments import (
    check_fixed_arguments,
    check_init,
    check_module,
    choose_strategy,
    parse_prefetch,
    split_ignored,
)
from zshard._calls import calls_of, parts_to_guard
from zshard._clip import clip_grad_norm
from zshard._controls import Controls
from zshard._copy import copy_module, copy_plain, copy_slices, is_within, without
from zshard._device import CPU, device_of
from zshard._fits import check_fits, parse_limit
from zshard._group import check_settings, comm_for, comms_for, resolve_groups
from zshard._memory import memory_of, options_of
from zshard._meta import Materializer
from zshard._nccl import NcclOptions
from zshard._parts import remember_parts
from zshard._plan import UnitSpec
from zshard._state import attach, refuse_strange_slices, whole_state_dict
from zshard._state_dict_type import state_dict_type
from zshard._summary import memory_table, summary_of
from zshard._summon import own_unit_as_on_rank_0, summon_full_params
from zshard._units import (
    ATTRIBUTE,
    Comms,
    Hook,
    Options,
    State,
    hook_forward,
    is_unit,
    known_hooks,
    state_of,
    units_of,
)
from zshard._values import Values, check_unit, dtypes_of, facts_of, names_of
from zshard.offload import offload_on, parse_offload, set_offload
from zshard.precision import (
    cast_buffers,
    install_casts,
    install_kept,
    parse_precision,
)
from zshard.wrap import CustomPolicy, plan_units

_classes: dict[type[nn.Module], type[FSDP]] = {}


class FSDP(Controls):
    """Wraps `module` for sharded data-parallel training; returns the same module object.

    Arguments, in FSDP1's order and with its names:

    process_group: ranks to shard over; the default group if None (made with gloo under torchrun if
        the script has made none; a world of one without torchrun). For a hybrid strategy a pair:
        ranks to shard over, ranks to replicate over; if None, each host's ranks hold one copy.
    device_mesh: instead of process_group, a mesh to shard over, or (replicate, shard) for a hybrid
        strategy.
    sharding_strategy (short: strategy): "full_shard" (ZeRO-3), "shard_grad_op" (ZeRO-2),
        "zero1", "no_shard" (DDP), "hybrid_shard" or "hybrid_shard_zero2" (HSDP), "hybrid_full"
        (HFSDP), or an enum member of that name; see zshard.ShardingStrategy.
    auto_wrap_policy: which submodules are gathered on their own. "auto" finds the repeated blocks;
        else a set of module classes, a policy or callable from zshard.wrap, or None for one unit.
    backward_prefetch, forward_prefetch: begin the next unit's gather before it is wanted, in the
        order of the last pass: in backward before the gradients of the unit before are computed
        ("backward_pre", or FSDP1's enum) or only while they are reduced ("backward_post", None);
        in forward if True, and always on GPUs. Over shm no gather takes time, and they change
        nothing.
    limit_all_gathers: one gather goes ahead at a time; if False, two.
    mixed_precision: a zshard.MixedPrecision or MixedPrecisionPolicy, or torch's; None: no casts.
    ignored_modules, ignored_states: modules (or parameters) that are left alone on every rank.
    param_init_fn: initialises a module's own parameters and buffers, where they are on the meta
        device; its reset_parameters() if None. Units are made real, initialised and sharded one at
        a time, so that a model need never be whole. With sync_module_states rank 0's values count.
    device_id: a GPU (its number, or a torch.device) to train on: parameters and buffers that are on
        the CPU or the meta device go there, a unit at a time; None: where the parameters are.
    sync_module_states: take parameters and buffers from rank 0 (default). If False, ranks whose
        values differ are an error.
    transport: "shm" (ranks of one host), "c10d" (anything torch.distributed reaches) or "auto";
        on GPUs "nccl", "peer" (ranks of one host), "c10d", "auto" or a zshard.NcclOptions.
    timeout: seconds that a wait for another rank may last; the process group's own if None.
    forward_sync_buffers: copy buffers from rank 0 at each forward, as DDP does by default.
    offload: a zshard.Offload, or a directory for one: parameters and optimizer state are kept in
        files there, for models larger than memory. cpu_offload: FSDP1's spelling; on CPU ranks all
        is in host memory anyway.
    memory_limit: bytes that zshard may hold on a rank ("12GiB" too); "auto": what the host's memory
        (MemAvailable), control groups and the process's limits leave it, divided among the ranks
        that share them; None: nobody looks. A model of which zshard would hold more is refused on
        all ranks, with what would fit; one that would not fit with Adam's state is warned of. What
        is offloaded to a disk does not count.

    Between steps each parameter holds this rank's slice, of shape (k, 1, ..., 1); inside forward
    and backward it is whole. `zshard.shard_info(p)` gives its whole shape.

    Raises ValueError or TypeError for what cannot be wrapped, naming it; NotImplementedError for
    arguments whose feature is still to come; DivergenceError (on every rank) if the ranks' models
    differ; PeerError if a rank is gone; MemoryError (on every rank, the module is as it was) where
    memory_limit refuses.
    """

    def __new__(
        cls,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = "auto",
        backward_prefetch: Any = "backward_pre",
        mixed_precision: Any = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Any = None,
        device_id: Any = None,
        sync_module_states: bool = True,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: Any = None,
        *,
        strategy: Any = None,
        transport: str | NcclOptions | None = None,
        timeout: float | None = None,
        forward_sync_buffers: bool = False,
        offload: Any = None,
        memory_limit: int | str | None = "auto",
    ) -> Any:
        check_fixed_arguments(use_orig_params)
        check_module(module)
        device = device_of(module, device_id)
        gpu = device != CPU  # where a gather that has not gone ahead holds the GPU up
        options = Options(
            choose_strategy(sharding_strategy, strategy),
            parse_precision(mixed_precision),
            parse_prefetch(backward_prefetch, forward_prefetch or gpu, limit_all_gathers),
            offload_on(parse_offload(offload, cpu_offload), device),
        )
        check_init(param_init_fn)
        limit = parse_limit(memory_limit)
        ignored = split_ignored(ignored_modules, ignored_states)
        specs = plan_units(module, auto_wrap_policy, *ignored)
        own = [options_of(spec, options) for spec in specs]
        check_settings(transport, timeout, device)
        groups = resolve_groups(process_group, device_mesh, options.strategy)
        comm = comm_for(groups.world, transport, timeout, device)
        facts = facts_of(module, specs, options, not sync_module_states)
        facts.append(("memory_limit", "None" if limit is None else "given"))
        check_agreement(comm, facts)
        settings = transport, timeout, device
        comms = _inner_comms(module, comms_for(groups, options.strategy, comm, settings))
        planned = list(zip(specs, own, strict=True))
        for spec in specs:  # what cannot be sharded at all has its own words
            check_unit(spec)
        check_fits(module, planned, comms, limit, device)
        source = comm if sync_module_states and comm.world > 1 else None
        values = Values(module, Materializer(module, param_init_fn, ignored[0]), source, device)
        _wrap(module, planned, comms, values)
        values.give_buffers(ignored[0])
        if comm.world > 1:
            watch(module, ignored[0])
        cast_buffers(module.modules(), options.precision)
        if forward_sync_buffers:
            _sync_buffers(module)
        return module

    if not TYPE_CHECKING:  # type checkers are to see the arguments of __new__

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass  # FSDP(module) returns an existing module; it must not be initialised again

    @property
    def module(self) -> Any:
        """The model as its original class, for scripts that come from DDP or FSDP1; a child called
        so wins. All that it has is this module's; only `module` it has not, so that code which
        unwraps models until there is none comes to an end."""
        if "module" in self._modules:
            return self._modules["module"]
        original: type[nn.Module] = type(self).__bases__[1]
        plain = object.__new__(original)
        plain.__dict__ = self.__dict__
        return plain

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales all gradients so that their global norm is at most `max_norm`; in place.

        Returns the norm before, a 0-dim tensor, the same bits on every rank. Collective. Raises
        RuntimeError with `error_if_nonfinite` for a norm that is NaN or infinite.
        """
        return clip_grad_norm(list(self.parameters()), max_norm, norm_type, error_if_nonfinite)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward leaves gradients on their rank, as in DDP and FSDP1.

        There, `.grad` is this rank's own gradient, whole, summed up over the backwards; that takes
        memory for the whole model's gradients. The next backward outside reduces the sum. For all
        ranks together; not inside a backward. Without it, each backward reduces and the sum stays
        sharded, which costs no more memory and gives the same gradient.
        """
        before = [(state.unit, state.unit.sync) for _, state in units_of(self)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, sync in before:
                unit.sync = sync

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backwards from now on reduce gradients (FSDP2's spelling of no_sync).

        recurse: units below this one as well. Takes effect at the next backward.
        """
        for module, state in units_of(self):
            if recurse or module is self:
                state.unit.sync = requires_gradient_sync

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Whole plain tensors under plain names; collective: call it on all ranks.

        Arguments as nn.Module.state_dict. Each rank gets the whole dict, or within state_dict_type
        what that says. Raises RuntimeError where it cannot give a parameter whole, naming it;
        PeerError if a rank is gone.
        """
        state = state_of(self)
        is_part = bool(args) or kwargs.get("destination") is not None  # of a larger dict
        keep = is_part or not state.rank0_only or state.comms.all.rank == 0
        whole = whole_state_dict(self, super().state_dict, args, kwargs, keep)
        if not keep:
            whole.clear()
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """nn.Module's, with whole tensors of which each rank takes its slice, or within
        state_dict_type slices that state_dict() gave there; needs no other rank. See also
        zshard.load_state_dict and zshard.load.

        Raises RuntimeError for slices that are not this rank's, before anything changes, and for
        what nn.Module raises it for; ValueError for assign=True.
        """
        refuse_strange_slices(self, state_dict)
        return super().load_state_dict(state_dict, *args, **kwargs)

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """nn.Module.apply, for initialisation say: parameters are whole where `fn` sees them, a
        unit at a time, and get the values that rank 0 gives them. For all ranks together."""
        with own_unit_as_on_rank_0(self):
            return super().apply(fn)

    summon_full_params = summon_full_params

    def summary(self) -> str:
        """A table of the units: name, parameters, bytes whole and per rank, strategy, transport;
        and one of the model's memory by part, in MiB: predicted, now and at most."""
        own = state_of(self)
        units = summary_of([state.unit for _, state in units_of(self)], own.comms)
        kinds = ("predicted", "now", "peak")
        return f"{units}\n\n{memory_table({kind: memory_of(self, kind) for kind in kinds})}"

    def memory(self, what: str = "now") -> dict[str, int]:
        """Bytes on this rank: shards, kept, grads, slots, buckets, transport, optimizer, and their
        total; and offloaded: what an Offload has put into files, or of a GPU's into its host's
        memory, which counts nowhere else.

        what: "now", what zshard holds now; "peak", the most that there has been of each part at a
        time since the model was wrapped, and of all together (holds by unshard() and the gradients
        of no_sync() are in it); "predicted", what a step takes with the settings as they are, if
        modules run in the order in which they stand in the model. What a step takes is reserved
        before the first one, so "now" is "predicted" but for the optimizer's state.

        "kept" is the copy of parameters that zero1 and hybrid_full keep between steps. "transport"
        is what the ranks' transport has for itself (over c10d, what is sent and received; over shm,
        the ranks' letter boxes): it is made once per process group and serves all models there, so
        do not add it up over models ("predicted": of a new one). "optimizer" is the state of this
        module's parameters in optimizers that have made a step; "predicted", until one has, that of
        Adam. The other parts are those of the whole model.

        Memory is counted when it is reserved; the system gives it when it is first touched. Raises
        ValueError for another `what`.
        """
        return memory_of(self, what)

    state_dict_type = staticmethod(state_dict_type)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FSDP]:
        """The modules under (and including) `module` that are units, parents first."""
        found = [m for m in module.modules() if isinstance(m, FSDP)]
        if not root_only:
            return found
        inner = {id(child) for unit in found for child in unit.modules() if child is not unit}
        return [unit for unit in found if id(unit) not in inner]

    def extra_repr(self) -> str:
        own = super().extra_repr()
        if not is_unit(self):
            return own
        state = state_of(self)
        name, transport = state.unit.name or "(root)", state.comms.all.transport
        note = f"unit={name!r}, {state.unit.strategy}, {transport}"
        return f"{own}, {note}" if own else note

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Another sharded model with the same values, over the same ranks; without gradients, as
        nn.Parameter copies. For all ranks together (a moving average of the weights, say)."""
        return copy_module(self, memo) if is_within() else _copy_model(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a sharded model cannot be pickled; save model.state_dict() instead")


def shard_info(param: torch.Tensor) -> dict[str, Any] | None:
    """Facts of a sharded parameter: name, unit, whole shape, and the (begin, numel) of its
    row-major elements that this rank owns. None for any other tensor."""
    return _core.shard_info(param)


# --- wrapping -------------------------------------------------------------------------------------


def _wrap(
    module: nn.Module,
    planned: list[tuple[UnitSpec, Options]],
    comms: Comms,
    values: Values | None = None,
) -> None:
    """Makes the units, children first, the root last; `values` sees to their parameters before."""
    engine = _core.Engine(type(module).__name__, *comms)
    engine.set_prefetch(*planned[-1][1].prefetch)
    inner = [state.unit for _, state in units_of(module)]
    for spec, _ in planned:  # all of them first: a model that is refused stays as it was
        check_unit(spec)
        _class_for(type(spec.module))
    set_offload(engine, planned[-1][1].offload)
    for spec, options in planned:
        if values is not None:
            values.give(spec)
        unit = _make_unit(engine, spec, options)
        state = State(unit, comms, options)
        remember_parts(state)
        _install(spec, state)
        casts = install_casts(spec.module, options.precision, spec.module is module)
        state.hooks += known_hooks(spec.module, casts)
        install_kept({owner for ref in spec.params for owner, _ in ref.owners}, options.precision)
        if unit.is_hooked and not unit.replicated:
            state.hooks += _guard_parts(spec, unit, module if len(planned) > 1 else None)
    for nested in inner:
        engine.adopt(nested)
    _rename_units(module)
    units = [state.unit for _, state in units_of(module)]
    engine.set_order(units)
    engine.set_calls(calls_of(module, units))
    engine.reserve()


def _make_unit(engine: _core.Engine, spec: UnitSpec, options: Options) -> _core.Unit:
    params = [ref.param for ref in spec.params]
    places = [
        (i, owner._parameters, attribute)
        for i, ref in enumerate(spec.params)
        for owner, attribute in ref.owners
    ]
    kind = options.strategy.in_group.value
    dtypes = dtypes_of(spec, options)
    return _core.Unit(engine, spec.name, kind, names_of(spec), params, places, *dtypes)


def _inner_comms(module: nn.Module, comms: Comms) -> Comms:
    """What is kept between steps is so for a whole model: inner units that keep decide for it."""
    for _, state in units_of(module):
        if comms.far is None and state.comms.far is not None and state.comms.all is comms.all:
            return state.comms
    return comms


def _rename_units(module: nn.Module) -> None:
    """Inner units were named from their own root; from now on it is this one."""
    for name, each in module.named_modules():
        if is_unit(each) and state_of(each).unit.name != name:
            state_of(each).unit.name = name


def _copy_model(model: FSDP, memo: dict[int, Any]) -> nn.Module:
    """A sharded model like `model`; ignored parameters and buffers are copied as they are."""
    units = [(module, state) for module, state in units_of(model)]
    own = state_of(model)
    with without([hook for _, state in units for hook in state.hooks]):
        copied = copy_plain(model, [(module, state.unit) for module, state in units], memo)
    options = {
        id(made): state.options for (_, state), (_, made) in zip(units, copied.units, strict=True)
    }
    policy = CustomPolicy(lambda module: id(module) in options)
    specs = plan_units(copied.module, policy, (), copied.others)
    _wrap(copied.module, [(spec, options[id(spec.module)]) for spec in specs], own.comms)
    if own.sync_buffers:
        _sync_buffers(copied.module)
    if own.comms.all.world > 1:
        others = {id(param) for param in copied.others}
        watch(copied.module, [m for m in copied.module.modules() if _has_own(m, others)])
    own.unit.engine.open()  # what a forward has left whole is resharded
    own.unit.engine.close()
    for unit, made in copied.units:
        copy_slices(unit, state_of(made).unit)
    return copied.module


def _has_own(module: nn.Module, params: set[int]) -> bool:
    return any(id(param) in params for param in module._parameters.values())


def _sync_buffers(module: nn.Module) -> None:
    state = state_of(module)
    state.sync_buffers = True
    if state.comms.all.world > 1:
        state.unit.engine.sync_buffers(list(module.buffers()))


def _install(spec: UnitSpec, state: State) -> None:
    module, unit = spec.module, state.unit
    if unit.is_hooked:
        state.hooks += known_hooks(module, hook_forward(module, unit))
        if not unit.replicated:
            attach(state, spec)
    module.__dict__[ATTRIBUTE] = state
    module.__class__ = _class_for(type(module))


def _guard_parts(spec: UnitSpec, unit: _core.Unit, root: nn.Module | None) -> list[Hook]:
    """Has some parts of a unit make it whole as well; returns each of them with a hook."""
    hooks = []
    for part in parts_to_guard(spec, root):
        hooks += known_hooks(part, hook_forward(part, unit))
    return hooks


def _class_for(original: type[nn.Module]) -> type[FSDP]:
    if original not in _classes:

        def make_plain(cls: type, *args: Any, **kwargs: Any) -> Any:
            """What type(model)(...) makes, as a container does of itself for a slice."""
            return original(*args, **kwargs)

        name = f"FSDP{original.__name__}"
        names = {"__module__": original.__module__, "__new__": make_plain}
        _classes[original] = type(name, (FSDP, original), names)
    return _classes[original]
