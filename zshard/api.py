"""`FSDP(module)`: the one entry. It wraps a module in place and hands the work to the C core.

The one idea: the module stays the same object with the same parameters and names; its class is
swapped to a subclass of (FSDP, its class), and two C callables become its forward hooks. Everything
that happens per step happens behind those hooks.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zshard import _core
from zshard._agree import Fact, check_agreement, tensor_fact, value_fact
from zshard._clip import clip_grad_norm
from zshard._controls import Controls
from zshard._copy import Guard, copy_module, copy_plain, copy_slices, is_within, without
from zshard._group import check_settings, comm_for, resolve_groups
from zshard._plan import UnitSpec
from zshard._state import attach, whole_state_dict
from zshard._summary import summary_of
from zshard.precision import (
    Precision,
    cast_arguments,
    cast_buffers,
    install_casts,
    install_kept,
    name_of,
    parse_precision,
)
from zshard.strategy import ShardingStrategy, parse_strategy
from zshard.wrap import CustomPolicy, plan_units

_Comms = tuple[
    _core.Comm, _core.Comm
]  # all ranks, and those that one copy of the model is cut over
_Options = tuple[ShardingStrategy, Precision]

_classes: dict[type[nn.Module], type[FSDP]] = {}


class _State:
    """What a unit's module remembers. Lives in the module's __dict__ as `_zshard_state`.

    Nothing in it leads back to the module: a model that is dropped gives its memory back at once,
    not when Python next looks for cycles.
    """

    def __init__(self, unit: _core.Unit, comms: _Comms, options: _Options) -> None:
        self.unit = unit
        self.comm, self.shards = comms
        self.options = options
        self.guards: list[Guard] = []
        self.sync_buffers = False  # the root's: from rank 0, at each forward
        self.hooks: list[Any] = []


class FSDP(Controls):
    """Wraps `module` for sharded data-parallel training; returns the same module object.

    Arguments, in FSDP1's order and with its names:

    process_group: ranks to shard over; the default group if None (made with gloo under torchrun if
        the script has made none; a world of one without torchrun). For a hybrid strategy a pair:
        ranks to shard over, ranks to replicate over; if None, each host's ranks hold one copy.
    device_mesh: instead of process_group, a mesh to shard over, or (replicate, shard) for a hybrid
        strategy.
    sharding_strategy (short: strategy): "full_shard" (ZeRO-3), "shard_grad_op" (ZeRO-2),
        "no_shard" (DDP), "hybrid_shard" or "hybrid_shard_zero2" (HSDP), or an enum member of that
        name.
    auto_wrap_policy: which submodules are gathered on their own. "auto" finds the repeated blocks;
        else a set of module classes, a policy or callable from zshard.wrap, or None for one unit.
    mixed_precision: a zshard.MixedPrecision or MixedPrecisionPolicy, or torch's; None: no casts.
    ignored_modules, ignored_states: modules (or parameters) that are left alone on every rank.
    device_id: None or "cpu".
    sync_module_states: take parameters and buffers from rank 0 (default). If False, ranks whose
        values differ are an error.
    transport: "shm" (ranks of one host), "c10d" (anything torch.distributed reaches) or "auto".
    timeout: seconds that a wait for another rank may last; the process group's own if None.
    forward_sync_buffers: copy buffers from rank 0 at each forward, as DDP does by default.

    Between steps each parameter holds this rank's slice, of shape (k, 1, ..., 1); inside forward
    and backward it is whole. `zshard.shard_info(p)` gives its whole shape.

    Raises ValueError or TypeError for what cannot be wrapped, naming it; NotImplementedError for
    arguments whose feature is still to come; DivergenceError (on every rank) if the ranks' models
    differ; PeerError if a rank is gone.
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
        transport: str | None = None,
        timeout: float | None = None,
        forward_sync_buffers: bool = False,
    ) -> Any:
        if cls is not FSDP:  # type(model)(...) makes another module of the original class
            raise TypeError(f"{cls.__name__} is made by FSDP(module), not called")
        _refuse_later_features(
            cpu_offload=cpu_offload,
            param_init_fn=param_init_fn,
            forward_prefetch=forward_prefetch,
        )
        _check_fixed_arguments(backward_prefetch, limit_all_gathers, use_orig_params, device_id)
        chosen = _choose_strategy(sharding_strategy, strategy)
        precision = parse_precision(mixed_precision)
        _check_module(module)
        ignored = _split_ignored(ignored_modules, ignored_states)
        specs = plan_units(module, auto_wrap_policy, *ignored)
        check_settings(transport, timeout)
        groups = resolve_groups(process_group, device_mesh, chosen.is_hybrid)
        comm = comm_for(groups.world, transport, timeout)
        facts = _facts(module, specs, chosen, not sync_module_states)
        facts.append(("mixed precision", repr(precision)))
        check_agreement(comm, groups.world, facts)
        shards = comm
        if groups.shards is not groups.world:
            shards = comm_for(groups.shards, transport, timeout)
        if sync_module_states and comm.world > 1:
            _take_from_rank_0(comm, module, specs, ignored)
        cast_buffers(module.modules(), precision)
        engine = _core.Engine(comm, type(module).__name__, shards)
        _wrap(module, specs, engine, (comm, shards), (chosen, precision))
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
        before = [(state.unit, state.unit.sync) for _, state in _units(self)]
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
        for module, state in _units(self):
            if recurse or module is self:
                state.unit.sync = requires_gradient_sync

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Whole plain tensors under plain names; collective: call it on all ranks.

        Arguments as nn.Module.state_dict. Each rank gets the whole dict. Raises RuntimeError where
        it cannot give a parameter whole, naming it; PeerError if a rank is gone.
        """
        return whole_state_dict(self, super().state_dict, args, kwargs)

    def summary(self) -> str:
        """A table of the units: name, parameters, bytes whole and per rank, strategy, transport."""
        own = _state_of(self)
        return summary_of([state.unit for _, state in _units(self)], own.comm, own.shards)

    def memory(self) -> dict[str, int]:
        """Bytes that zshard holds on this rank now: shards, grads, slots, buckets, transport.

        All but the last are this model's. "transport" is what the ranks' transport has for itself
        (over c10d, what is sent and received; over shm, the ranks' letter boxes): it is made once
        per process group and serves all models there, so do not add it up over models.
        """
        return dict(_state_of(self).unit.engine.memory())

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
        state = self.__dict__.get("_zshard_state")
        if state is None:
            return own
        note = (
            f"unit={state.unit.name or '(root)'!r}, {state.unit.strategy}, {state.comm.transport}"
        )
        return f"{own}, {note}" if own else note

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Another sharded model with the same values, over the same ranks; without gradients, as
        nn.Parameter copies. For all ranks together (a moving average of the weights, say)."""
        return copy_module(self, memo) if is_within() else _copy_model(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a sharded model cannot be pickled; save model.state_dict() instead")


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Has another method of a unit's module do what its forward does: gather the unit's parameters,
    and take care of their gradients. For `forward_features`, `encode` and the like; a method that
    calls the modules, as transformers' `generate` does, needs nothing.

    For all modules of that class. A module that FSDP has not wrapped is left alone. Raises
    AttributeError where there is no such method.
    """
    if not isinstance(module, FSDP):
        return
    original = getattr(type(module), method_name)
    if hasattr(original, "_zshard_original"):
        return

    @functools.wraps(original)
    def method(self: FSDP, *args: Any, **kwargs: Any) -> Any:
        unit = _state_of(self).unit
        if not unit.is_hooked:
            return original(self, *args, **kwargs)
        args, kwargs = cast_arguments(self, args, kwargs)
        unit.pre_forward(self, args)
        output = None
        try:
            output = original(self, *args, **kwargs)
        finally:
            unit.post_forward(self, args, output)
        return output

    method._zshard_original = original  # type: ignore[attr-defined]
    setattr(type(module), method_name, method)


def shard_info(param: torch.Tensor) -> dict[str, Any] | None:
    """Facts of a sharded parameter: name, unit, whole shape, and the (begin, numel) of its
    row-major elements that this rank owns. None for any other tensor."""
    return _core.shard_info(param)


# --- arguments ------------------------------------------------------------------------------------


def _refuse_later_features(**values: Any) -> None:
    for name, value in values.items():
        off = value is None or value is False
        if name == "cpu_offload" and getattr(value, "offload_params", None) is False:
            off = True
        if not off:
            raise NotImplementedError(
                f"FSDP({name}=...) is not in this version of zshard; leave it out"
            )


def _check_fixed_arguments(
    backward_prefetch: Any, limit_all_gathers: bool, use_orig_params: bool, device_id: Any
) -> None:
    prefetch = backward_prefetch
    name = prefetch.name if isinstance(prefetch, enum.Enum) else prefetch
    if not isinstance(name, str) or name.lower() != "backward_pre":
        raise NotImplementedError(
            f"FSDP(backward_prefetch={backward_prefetch!r}) is not in this version of zshard; "
            "leave it at its default"
        )
    if not limit_all_gathers:
        raise NotImplementedError("FSDP(limit_all_gathers=False) is not in this version of zshard")
    if not use_orig_params:
        raise NotImplementedError(
            "FSDP(use_orig_params=False): zshard always keeps the original parameters; leave it out"
        )
    if isinstance(device_id, int) or torch.device(device_id or "cpu").type != "cpu":
        raise NotImplementedError(f"FSDP(device_id={device_id!r}): this version trains on the CPU")


def _choose_strategy(sharding_strategy: Any, strategy: Any) -> ShardingStrategy:
    if sharding_strategy is not None and strategy is not None:
        raise ValueError("give sharding_strategy or its short name strategy, not both")
    given = strategy if strategy is not None else sharding_strategy
    return ShardingStrategy.FULL_SHARD if given is None else parse_strategy(given)


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"FSDP takes an nn.Module, not {type(module).__name__}")
    if isinstance(module, FSDP):
        raise ValueError(
            f"this {type(module).__name__} is wrapped already; call FSDP once on each module "
            "(inner modules first if you wrap by hand)"
        )
    devices: dict[torch.device, str] = {}
    for name, param in module.named_parameters():
        devices.setdefault(param.device, name)
    if len(devices) > 1:
        places = ", ".join(f"'{name}' on {device}" for device, name in devices.items())
        raise ValueError(f"all parameters have to be on one device; there are {places}")


def _split_ignored(
    modules: Iterable[nn.Module] | None,
    states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    ignored_modules, ignored_params = set(modules or ()), set()
    for item in states or ():
        if isinstance(item, nn.Module):
            ignored_modules.add(item)
        elif isinstance(item, nn.Parameter):
            ignored_params.add(item)
        else:
            raise TypeError(f"ignored_states holds modules or parameters, not {item!r}")
    for module in ignored_modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"ignored_modules holds modules, not {module!r}")
    return ignored_modules, ignored_params


# --- agreement and values -------------------------------------------------------------------------


def _facts(
    module: nn.Module, specs: list[UnitSpec], strategy: ShardingStrategy, values: bool
) -> list[Fact]:
    facts: list[Fact] = [("the strategy", strategy.value), ("torch", torch.__version__)]
    for spec in specs:
        facts.append((f"unit '{spec.name}'", type(spec.module).__name__))
        for ref in spec.params:
            name = _join(spec.name, ref.names[0])
            facts.append(tensor_fact("parameter", name, ref.param))
            if values and not ref.param.is_meta:
                facts.append(value_fact(name, ref.param))
    facts.extend(tensor_fact("buffer", name, b) for name, b in module.named_buffers())
    return facts


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _take_from_rank_0(
    comm: _core.Comm,
    module: nn.Module,
    specs: list[UnitSpec],
    ignored: tuple[set[nn.Module], set[nn.Parameter]],
) -> None:
    left_alone = {id(b) for m in ignored[0] for b in m.buffers()}
    tensors = [ref.param.detach() for spec in specs for ref in spec.params]
    tensors += [b.detach() for b in module.buffers() if id(b) not in left_alone]
    for tensor in tensors:
        if tensor.is_meta or tensor.layout != torch.strided or tensor.numel() == 0:
            continue  # the unit names what cannot be sharded
        plain = tensor.contiguous()
        comm.broadcast(plain, 0)
        if plain is not tensor:
            tensor.copy_(plain)


# --- wrapping -------------------------------------------------------------------------------------


def _wrap(
    module: nn.Module,
    specs: list[UnitSpec],
    engine: _core.Engine,
    comms: _Comms,
    options: _Options,
) -> None:
    strategy, usual = options
    inner = [state.unit for _, state in _units(module)]
    for spec in specs:  # all of them first: a model that is refused stays as it was
        _core.Unit.check(spec.name, _names(spec), [ref.param for ref in spec.params])
        _class_for(type(spec.module))
    for spec in specs:
        override = spec.overrides.get("sharding_strategy", spec.overrides.get("strategy"))
        own = strategy if override is None else parse_strategy(override)
        tensors = [ref.param for ref in spec.params]
        places = [
            (i, owner._parameters, attribute)
            for i, ref in enumerate(spec.params)
            for owner, attribute in ref.owners
        ]
        given = spec.overrides.get("mixed_precision")
        precision = usual if given is None else parse_precision(given)
        keep = {
            i
            for i, ref in enumerate(spec.params)
            if all(precision.keeps(owner) for owner, _ in ref.owners)
        }
        dtypes = (name_of(precision.compute), name_of(precision.wire), keep)
        kind = own.in_group.value
        unit = _core.Unit(engine, spec.name, kind, _names(spec), tensors, places, *dtypes)
        state = _State(unit, comms, (own, precision))
        _install(spec, state)
        state.hooks += install_casts(spec.module, precision, spec.module is module)
        install_kept({owner for ref in spec.params for owner, _ in ref.owners}, precision)
        if unit.is_hooked and not unit.replicated:
            state.guards = _guard_parts(spec, unit, module if len(specs) > 1 else None)
    for nested in inner:
        engine.adopt(nested)
    _rename_units(module)
    engine.set_order([state.unit for _, state in _units(module)])


def _rename_units(module: nn.Module) -> None:
    """Inner units were named from their own root; from now on it is this one."""
    for name, each in module.named_modules():
        unit = each.__dict__.get("_zshard_unit")
        if unit is not None and unit.name != name:
            unit.name = name


def _names(spec: UnitSpec) -> list[str]:
    return [_join(spec.name, ref.names[0]) for ref in spec.params]


def _copy_model(model: FSDP, memo: dict[int, Any]) -> nn.Module:
    """A sharded model like `model`; ignored parameters and buffers are copied as they are."""
    units = [(module, state) for module, state in _units(model)]
    own = _state_of(model)
    guards = [guard for _, state in units for guard in state.guards]
    with without(guards):
        copied = copy_plain(model, [(module, state.unit) for module, state in units], memo)
    overrides = {
        id(made): dict(zip(("strategy", "mixed_precision"), state.options, strict=True))
        for (_, state), (_, made) in zip(units, copied.units, strict=True)
    }
    policy = CustomPolicy(lambda module: overrides.get(id(module), False))
    specs = plan_units(copied.module, policy, (), copied.others)
    engine = _core.Engine(own.comm, type(model).__name__, own.shards)
    _wrap(copied.module, specs, engine, (own.comm, own.shards), own.options)
    if own.sync_buffers:
        _sync_buffers(copied.module)
    own.unit.engine.open()  # what a forward has left whole is resharded
    own.unit.engine.close()
    for unit, made in copied.units:
        copy_slices(unit, _state_of(made).unit)
    return copied.module


def _sync_buffers(module: nn.Module) -> None:
    state = _state_of(module)
    state.sync_buffers = True
    if state.comm.world > 1:
        state.unit.engine.sync_buffers(list(module.buffers()))


def _install(spec: UnitSpec, state: _State) -> None:
    module, unit = spec.module, state.unit
    if unit.is_hooked:
        state.hooks = [
            module.register_forward_pre_hook(unit.pre_forward, prepend=True),
            module.register_forward_hook(unit.post_forward, always_call=True),
        ]
        if not unit.replicated:
            attach(unit, spec)
    module.__dict__["_zshard_unit"] = unit
    module.__dict__["_zshard_state"] = state
    module.__class__ = _class_for(type(module))


def _guard_parts(spec: UnitSpec, unit: _core.Unit, root: nn.Module | None) -> list[Guard]:
    """Has some parts of a unit make it whole as well: scripts call parts by themselves, as
    `model.encoder(ids)` does in generate(), with a shared embedding that is in the root's unit.

    Those are what lies in the `root` of several units, little as a rule, and all embeddings: most
    modules refuse weights of a slice's shape, an embedding would silently look up in it. Returns
    each such part with a hook.
    """
    guards = []
    owners = {id(owner): owner for ref in spec.params for owner, _ in ref.owners}
    for owner in owners.values():
        is_embedding = isinstance(owner, nn.Embedding | nn.EmbeddingBag)
        if owner is not spec.module and (spec.module is root or is_embedding):
            before = owner.register_forward_pre_hook(unit.pre_forward, prepend=True)
            after = owner.register_forward_hook(unit.post_forward, always_call=True)
            guards += [(weakref.ref(owner), before.id), (weakref.ref(owner), after.id)]
    return guards


def _class_for(original: type[nn.Module]) -> type[FSDP]:
    if original not in _classes:
        name = f"FSDP{original.__name__}"
        _classes[original] = type(name, (FSDP, original), {"__module__": original.__module__})
    return _classes[original]


def _state_of(module: nn.Module) -> _State:
    state: _State = module.__dict__["_zshard_state"]
    return state


def _units(module: nn.Module) -> Iterator[tuple[nn.Module, _State]]:
    """The wrapped modules under `module`, parents before children, as modules appear."""
    for each in module.modules():
        if "_zshard_state" in each.__dict__:
            yield each, _state_of(each)
