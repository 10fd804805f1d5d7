"""`FSDP(module)`: the entry point. Wraps a module in place and hands the work to the C core.

The module stays the same object with the same parameters and names; its class becomes a subclass of
(FSDP, its class), and two C callables become its forward hooks, which do all per-step work.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zshard import _core, _patches
from zshard.guard.outside import NoDdp, refuse_ddp_around
from zshard.model.fsdp1 import Fsdp1Methods
from zshard.model.methods import ModelMethods
from zshard.model.own_names import refuse_names, warn_of_clashes, yields_to_the_model
from zshard.model.shard_model import FsdpSettings, refuse_half, shard_model
from zshard.model.summon import own_unit_as_on_rank_0
from zshard.model.torch_names import TorchNames, names_without_module
from zshard.options import (
    CPUOffloadLike,
    DeviceLike,
    InitFn,
    OffloadLike,
    PrecisionLike,
    PrefetchLike,
    ProcessGroupLike,
    StrategyLike,
    WrapPolicyLike,
    check_arguments,
    checks_names,
    either,
    parse_options,
    split_ignored,
)
from zshard.ranks.devices import device_of
from zshard.ranks.nccl import NcclOptions
from zshard.ranks.wire import Wire
from zshard.state.module import whole_state_dict
from zshard.units.open_forwards import call_guarded, uncompiled
from zshard.units.returned import note_used
from zshard.units.shards import sizes_for_torch
from zshard.units.units import MADE, BufferSync, OnNonfinite, is_unit, modules_of, state_of
from zshard.upper import import_upper
from zshard.wrap import plan_units

_M = TypeVar("_M", bound=nn.Module)


@yields_to_the_model
class FSDP(Fsdp1Methods, ModelMethods, TorchNames):
    """Wrap a module for sharded data-parallel training, in place, and return it.

    Each rank keeps a shard of the parameters, gradients and optimizer state. The module stays the
    same object, with the same parameters under the same names; its class becomes a subclass of FSDP
    and of the class that it had. Between steps a parameter is this rank's shard, a tensor of shape
    (k, 1, ..., 1); inside forward and backward it has its full shape, which `zshard.shard_info(p)`
    also returns. The submodules that auto_wrap_policy chooses become units, which are all-gathered
    one at a time; the module itself is the root unit and holds the remaining parameters.

    Collective: call it on all ranks, with the same model and arguments.

    Example::

        model = zshard.FSDP(Transformer(), strategy="full_shard", auto_wrap_policy={Block})
        optimizer = zshard.AdamW(model.parameters(), lr=3e-4)  # after wrapping
        model(inputs).sum().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()

    Args:
        module: the nn.Module to wrap.

    What is sharded, and over which ranks:

        strategy: what to shard and for how long. "full_shard" (ZeRO-3, the default),
            "shard_grad_op" (ZeRO-2), "zero1", "no_shard" (DDP), "hybrid_shard" or
            "hybrid_shard_zero2" (HSDP), "hybrid_full" (HFSDP); or a name in parentheses, such as
            "zero3"; or a zshard.ShardingStrategy, or torch's enum.
        sharding_strategy: FSDP1's name for `strategy`. Pass only one of them.
        process_group: the ranks to shard over. For a hybrid strategy, a pair: the ranks to shard
            over and the ranks to replicate over. Default: None, the default process group. If
            torchrun started several ranks, zshard initializes it with gloo unless the script has;
            a single process has none. With a hybrid strategy, None makes one replica per host.
        device_mesh: a DeviceMesh, instead of process_group: one-dimensional to shard over, or
            two-dimensional (replicate, shard) for a hybrid strategy. Default: None.
        ignored_modules: modules that zshard leaves alone, on every rank. Default: None.
        ignored_states: parameters, or modules, that zshard leaves alone, on every rank. Default:
            None.

    Wrapping:

        auto_wrap_policy: which submodules become units. "auto" (the default) finds the repeated
            blocks of the model. Or a set (or list) of module classes; a policy from zshard.wrap or
            torch.distributed.fsdp.wrap; a callable (module, recurse, nonwrapped_numel) -> bool or
            (module) -> bool; or None for a single unit.

    Precision:

        mixed_precision: a MixedPrecision or MixedPrecisionPolicy, zshard's or torch's. Default:
            None, no casts.

    Memory and offload:

        offload: a zshard.Offload, or a directory. With a directory, parameters and optimizer state
            live in files there, so that a model may be larger than memory. Default: None.
        cpu_offload: FSDP1's and FSDP2's spelling of `offload`: True, torch's CPUOffload, or an
            offload policy. On CPU ranks it has no effect, since everything is in host memory.
            Default: None. Pass only one of `offload` and `cpu_offload`.
        memory_limit: the bytes that zshard may allocate on this rank, as a number or a string such
            as "12GiB". "auto" (the default): on a CPU, what the host, the control groups and the
            process's limits leave to it, divided among the ranks that share them; on a GPU, the
            free GPU memory. None: no check. A model that needs more is a MemoryError on all ranks,
            which lists settings that fit; one that fits, but not with Adam's state, a warning. On a
            CPU, an optimizer's first step() raises MemoryError on all ranks, before it allocates
            anything, if its state does not fit on one of them.
        keep_gathered: which units stay gathered from forward to backward instead of being gathered
            twice (not over "shm", where a gather moves nothing): more memory, less traffic,
            bit-identical results. "auto" (the default): where all-gathers cross hosts, as many as
            fit into what memory_limit leaves after the first steps; nothing on one host, or with
            memory_limit=None. True: all. False: none. A number of bytes, or a string such
            as "2GiB": up to so many bytes of full parameters. The outermost call's argument counts.

    Initialization:

        device_id: the GPU to train on, as an index, string or torch.device. Parameters and buffers
            on the CPU or the meta device are moved there one unit at a time. Default: None, the
            device that the parameters are on.
        param_init_fn: called with each module that has parameters or buffers of its own on the meta
            device; it must initialize them. zshard.uninitialized leaves them as NaN, for models
            that load a checkpoint next. Default: None, the module's reset_parameters(). Units are
            materialized, initialized and sharded one at a time, so the full model never has to fit
            in memory. With sync_module_states, rank 0's values count.
        sync_module_states: True (the default): take parameters and buffers from rank 0. False:
            ranks whose values differ raise DivergenceError.

    Prefetch (no effect over "shm", where an all-gather takes no time):

        backward_prefetch: when backward starts the all-gather of the next unit, in the order of
            the last pass. "backward_pre" (the default, or torch's enum): before it computes the
            gradients of the current unit. "backward_post" or None: while those are being reduced.
        forward_prefetch: True: forward starts the all-gather of the next unit early. False (the
            default): only if backward does, which takes no more memory; GPUs always do.
        limit_all_gathers: True (the default): prefetch one unit at a time. False: two. Units that
            stay gathered until backward have their own memory: forward prefetches up to eight.

    Communication:

        transport: on CPUs "shm" (ranks on one host), "hosts" (several hosts with the same number
            of ranks each), "c10d" (any torch.distributed process group) or "auto"; on GPUs "nccl",
            "c10d", "auto" ("nccl" where all ranks have it and a GPU each, else "c10d") or a
            zshard.NcclOptions. Default: None, the environment variable ZSHARD_TRANSPORT, else
            "auto".
        wire: how gradients and parameters cross hosts over "hosts" and "nccl": "bf16" (half the
            bytes of float32); a zshard.Wire sets them apart. What that rounds off gradients goes
            into the next step's. Forward and backward compute with rounded parameters; shards, the
            optimizer and checkpoints stay exact. No effect on one host; not supported over "c10d".
            Default: None, exact.
        timeout: seconds that one wait for another rank may take. Default: None, the environment
            variable ZSHARD_TIMEOUT, else that of units inside, else the process group's. Models
            that share their ranks keep their own timeouts; units of one model have the same.
        forward_sync_buffers: True: broadcast buffers from rank 0 in each forward. "training": only
            in forwards with gradients, as DDP does it (not after a forward within no_sync()), so
            that one rank may evaluate alone. Default: False; "training" in trainers' adapters.

    Checks before each optimizer step, on CPU ranks (not with optimizer_in_backward):

        nonfinite: what all ranks do together if a gradient is infinite or NaN on any of them.
            "raise": NonFiniteError, before anything is updated. "skip": the step changes nothing,
            with a warning the first time. Both name the first such parameter, and the ranks that
            it comes from unless the script has changed gradients itself. A GradScaler's own skip
            comes first. Costs an exchange of one number. Default: None, not checked.
        check_replicas: compare, every so many steps, checksums of equal values that ranks hold:
            parameters under "no_shard" and between the replicas of a hybrid strategy, and buffers
            but for those that every rank has changed. DivergenceError names the rank and the
            parameter. Default: 0, never.

    Reproducibility:

        deterministic: "any-world": the same bits for any number of ranks, transport and strategy.
            A step is `micro_batches` forwards and backwards of all ranks together, whose gradients
            zshard adds in a fixed order and divides by their number; see micro_batches() and
            docs/fault_tolerance.md#any-number-of-ranks. Float32 or float64 parameters on CPUs.
            Default: None, the bits of DDP with the same number of ranks.
        micro_batches: how many that are; at least as many as ranks. Default: None.

    Compatibility with FSDP1, whose positional order of arguments this signature keeps, and DDP:

        use_orig_params: must be True (the default): zshard always keeps the original parameters.
        device_ids: DDP's spelling of `device_id`: a list of one GPU, or None (the default).

    Returns:
        `module` itself. A type checker sees FSDP's methods, takes all other attributes as Any, and
        accepts the result where the module's own class is expected. `model.module` has the module's
        own type.

    Raises:
        TypeError, ValueError: an argument is invalid, or the module cannot be wrapped; the message
            names the argument or the parameter.
        NotImplementedError: an argument asks for a feature that zshard does not support.
        DivergenceError: the ranks' models or arguments differ (on every rank).
        MemoryError: the model exceeds memory_limit (on every rank; the module is unchanged).
        PeerError: another rank exited. PeerTimeoutError: another rank did not arrive in time.
    """

    @checks_names("FSDP()")
    def __new__(
        cls,
        module: _M,
        process_group: ProcessGroupLike | None = None,
        sharding_strategy: StrategyLike | None = None,
        cpu_offload: CPUOffloadLike | None = None,
        auto_wrap_policy: WrapPolicyLike | None = "auto",
        backward_prefetch: PrefetchLike | None = "backward_pre",
        mixed_precision: PrecisionLike | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: InitFn | None = None,
        device_id: DeviceLike | None = None,
        sync_module_states: bool = True,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        strategy: StrategyLike | None = None,
        transport: str | NcclOptions | None = None,
        wire: str | Wire | None = None,
        timeout: float | None = None,
        forward_sync_buffers: BufferSync = False,
        offload: OffloadLike | None = None,
        memory_limit: int | str | None = "auto",
        keep_gathered: bool | int | str = "auto",
        device_ids: Sequence[DeviceLike] | None = None,
        nonfinite: OnNonfinite = None,
        check_replicas: int = 0,
        deterministic: str | None = None,
        micro_batches: int | None = None,
    ) -> Wrapped[_M]:
        arguments = dict(locals())
        _patches.install()
        import_upper()
        check_arguments(arguments)
        refuse_names(module)
        refuse_half(module)
        device = device_of(
            module, either(device_id=device_id, device_ids=device_ids and device_ids[0])
        )
        options = parse_options(arguments | {"device": device})
        ignored = split_ignored(ignored_modules, ignored_states)
        specs = plan_units(module, auto_wrap_policy, *ignored, options=options)
        warn_of_clashes(FSDP, specs)
        settings = FsdpSettings(
            *(device, process_group, device_mesh, transport, timeout, param_init_fn),
            *(sync_module_states, forward_sync_buffers, ignored[0]),
        )
        shard_model(FSDP, module, specs, settings)
        return cast("Wrapped[_M]", module)

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Call the method of the model's class, which may register subclasses, but not for a
        sharded module's class."""
        if MADE not in vars(cls):
            super().__init_subclass__(**kwargs)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # the module's own class has it

    else:  # type checkers see the arguments of __new__

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass  # FSDP(module) returns an existing module: do not initialize it again

    _ddp_params_and_buffers_to_ignore = NoDdp()

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward. After any exception the model is ready for the next forward."""
        refuse_ddp_around()
        return call_guarded(self, state_of(self).unit, super().__call__, args, kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict: full, plain tensors under the names of the unwrapped model.

        Over shm, any rank may call it alone; over c10d and on GPUs it is collective. Each rank that
        calls it gets the full dict, of one step. Within state_dict_type(), the dict has the form
        that was chosen there. Takes the arguments of nn.Module.state_dict.

        Raises:
            RuntimeError: a parameter cannot be unsharded; the message names it.
            PeerError: another rank exited.
        """
        state = state_of(self)
        is_part = bool(args) or kwargs.get("destination") is not None  # appends to a larger dict
        keep = is_part or not state.form.rank0_only or state.comms.all.rank == 0
        full = whole_state_dict(self, super().state_dict, args, kwargs, keep)
        if not keep:
            full.clear()
        return full

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of full tensors; each rank copies its own shard.

        Not collective: it does not communicate. Names may all begin with "module.", as DDP saves
        them. Takes the arguments and returns the missing and unexpected keys of
        nn.Module.load_state_dict. See also zshard.load_state_dict and zshard.load.

        Raises RuntimeError as nn.Module.load_state_dict does, and ValueError for assign=True.
        """
        state_dict = names_without_module(self, state_dict)
        note_used(state_dict.values() if isinstance(state_dict, Mapping) else ())
        with sizes_for_torch(self):
            return super().load_state_dict(state_dict, *args, **kwargs)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call `fn` on each submodule and on this module, as nn.Module.apply, for example to
        initialize them.

        `fn` sees full parameters, one unit at a time; the values that rank 0 writes count.
        Collective: call it on all ranks. Returns this module.
        """
        with own_unit_as_on_rank_0(self):
            return super().apply(fn)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FSDP]:
        """Return the units at and below `module`, parents first.

        root_only: only those that are not inside another unit. Default: False.
        """
        return modules_of(FSDP, module, root_only)

    def extra_repr(self) -> str:
        shown = super().extra_repr()
        if not is_unit(self):
            return shown
        state = state_of(self)
        name, transport = state.unit.name or "(root)", state.comms.all.transport
        note = f"unit={name!r}, {state.unit.strategy}, {transport}"
        return f"{shown}, {note}" if shown else note

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return another sharded model with the same values, over the same ranks, for example for
        a moving average of the weights. Gradients are not copied, as nn.Parameter copies none.
        Collective: call it on all ranks."""
        from zshard.model.copy import copy_model  # few scripts copy a model

        return copy_model(self, memo)

    def __copy__(self) -> NoReturn:
        raise TypeError(
            "copy.copy() cannot copy a sharded model: use copy.deepcopy(model), on all ranks"
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("a sharded model cannot be pickled; save model.state_dict() instead")


ARGUMENTS = frozenset(inspect.signature(FSDP.__new__).parameters) - {"cls", "module"}
"""The names of what FSDP() takes besides the module, for adapters that pass it on."""

if TYPE_CHECKING:

    class Wrapped(FSDP, Generic[_M], Any):  # type: ignore[misc]
        """The type of FSDP(module) for type checkers: a module of class _M with FSDP's methods.

        Python's type system has no intersection types. The base Any comes close: the result has
        FSDP's typed methods, accepts any attribute that _M may have, and passes as an _M.
        """

        @property
        def module(self) -> _M: ...

else:

    class Wrapped(Generic[_M]):
        """For annotations only: class_for() makes the class of the result at run time."""


def shard_info(param: torch.Tensor) -> dict[str, Any] | None:
    """Return a dict that describes a sharded parameter, or None for any other tensor.

    "name" and "unit": its name, and that of its unit. "shape": its full shape. "begin" and "numel":
    this rank owns that many elements from element `begin` on, in row-major order.
    """
    return _core.shard_info(param)
