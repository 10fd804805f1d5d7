"""The arguments of FSDP(), parsed once: their types, and the Options that they make.

A type checker accepts what the checks at run time accept: zshard's objects, their names as strings,
and torch's objects. Enums, dataclasses and policies are recognized by name and fields, so only type
checkers import torch's FSDP, which takes long to import.
"""

from __future__ import annotations

import enum
import functools
import inspect
import os
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import torch
from torch import nn

from zshard._errors import did_you_mean
from zshard.offload import CPUOffload, Offload, OffloadPolicy
from zshard.precision import MixedPrecision, MixedPrecisionPolicy, precision_of
from zshard.strategy import ShardingStrategy, strategy_of
from zshard.units.units import Options, Prefetch
from zshard.wrap import CustomPolicy
from zshard.wrap.tree import UnitSpec

if TYPE_CHECKING:
    import torch.distributed.fsdp as torch_fsdp
    from torch.distributed import ProcessGroup

    TorchStrategy = torch_fsdp.ShardingStrategy
    TorchPrefetch = torch_fsdp.BackwardPrefetch
    TorchPrecision = torch_fsdp.MixedPrecision | torch_fsdp.MixedPrecisionPolicy
    TorchCPUOffload = torch_fsdp.CPUOffload
    TorchOffloadPolicy = torch_fsdp.OffloadPolicy
else:
    TorchStrategy = TorchPrefetch = enum.Enum
    ProcessGroup = TorchPrecision = TorchCPUOffload = TorchOffloadPolicy = Any

# --- types ----------------------------------------------------------------------------------------


class TorchWrapPolicy(Protocol):
    """A policy object of torch.distributed.fsdp.wrap."""

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]: ...


# With a literal next to `str`, editors complete the value, and a script may still pass a string
# from its command line; FSDP() checks the value.
StrategyLike = (
    Literal[
        "full_shard",
        "shard_grad_op",
        "zero1",
        "no_shard",
        "hybrid_shard",
        "hybrid_shard_zero2",
        "hybrid_full",
    ]
    | str
    | ShardingStrategy
    | TorchStrategy
)
ProcessGroupLike = ProcessGroup | tuple[ProcessGroup, ProcessGroup]
WrapPolicyLike = (
    Literal["auto"]
    | str
    | Collection[type[nn.Module]]
    | CustomPolicy
    | TorchWrapPolicy
    | Callable[..., bool]
)
PrefetchLike = Literal["backward_pre", "backward_post"] | str | TorchPrefetch
PrecisionLike = MixedPrecision | MixedPrecisionPolicy | TorchPrecision
InitFn = Callable[[nn.Module], object]
DeviceLike = int | str | torch.device
OffloadLike = Offload | str | os.PathLike[str]
CPUOffloadLike = bool | Offload | CPUOffload | OffloadPolicy | TorchCPUOffload | TorchOffloadPolicy
OffloadPolicyLike = Offload | OffloadPolicy | TorchOffloadPolicy

# --- names ----------------------------------------------------------------------------------------

_F = TypeVar("_F", bound=Callable[..., Any])


def checks_names(call: str, others: Collection[str] = ()) -> Callable[[_F], _F]:
    """Decorator: an argument that `call` lacks is a TypeError that names the one that was meant.

    others: the names that the function takes as **options.
    """

    def decorate(function: _F) -> _F:
        known = {*inspect.signature(function).parameters, *others}

        @functools.wraps(function)
        def checked(*args: Any, **arguments: Any) -> Any:
            for name in arguments:
                if name not in known:
                    hint = did_you_mean(name, known)
                    raise TypeError(f"{call} got an unexpected argument '{name}'{hint}")
            return function(*args, **arguments)

        return cast("_F", checked)

    return decorate


# --- parsing --------------------------------------------------------------------------------------


def either(**given: Any) -> Any:
    """Return the value that a script passes by one of two names; None if it passes neither. Raises
    ValueError if it passes both."""
    (first, one), (second, other) = given.items()
    if one is not None and other is not None:
        raise ValueError(f"pass either {first} or {second}, not both")
    return other if one is None else one


def one_device(device_ids: Sequence[DeviceLike] | None) -> DeviceLike | None:
    """Return the device that DDP's list of one GPU specifies. Raises ValueError for any other."""
    if device_ids is None:
        return None
    if not isinstance(device_ids, list | tuple) or len(device_ids) != 1:
        raise ValueError(
            f"device_ids={device_ids!r}: expected a list of one GPU, that of this rank"
        )
    found: DeviceLike = device_ids[0]
    return found


def prefetch_of(
    backward_prefetch: PrefetchLike | None, forward_prefetch: bool, limit_all_gathers: bool
) -> Prefetch:
    """Translate the three arguments about prefetching. Raises ValueError for an unknown value."""
    given = backward_prefetch
    name = given.name if isinstance(given, enum.Enum) else given
    name = name.lower() if isinstance(name, str) else name
    if name not in (None, "backward_pre", "backward_post"):
        raise ValueError(
            f"backward_prefetch must be 'backward_pre', 'backward_post' or None, got {given!r}"
        )
    units = 1 if limit_all_gathers else 2
    backward = units if name == "backward_pre" else 0
    return Prefetch(units if forward_prefetch else backward, backward)


def check_use_orig_params(use_orig_params: bool) -> None:
    """Raise NotImplementedError for a value that zshard does not support."""
    if not use_orig_params:
        raise NotImplementedError(
            "use_orig_params=False is not supported: zshard always keeps the original parameters; "
            "omit use_orig_params"
        )


def check_environment(options: Options) -> None:
    """Raise NotImplementedError where FSDP1's environment variable would change numbers."""
    rounds = options.precision.compute or options.precision.wire or options.wire.parameters
    if rounds is not None and os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1":
        raise NotImplementedError(
            "FSDP_USE_FULL_PREC_IN_EVAL=1 is not supported: unset it; to evaluate in full "
            "precision, load model.state_dict() into a model that is not sharded"
        )


def unit_options(spec: UnitSpec, usual: Options) -> Options:
    """Return the model's options with a CustomPolicy's overrides for this unit. Raises ValueError
    for an override that only applies to an entire model."""
    strategy, precision = usual.strategy, usual.precision
    given = spec.overrides.get("sharding_strategy", spec.overrides.get("strategy"))
    if given is not None:
        strategy = strategy_of(given)
    if strategy is not usual.strategy and (strategy.is_hybrid or strategy.keeps):
        raise ValueError(
            f"unit '{spec.name}' requests strategy {strategy.value!r}, but the model has "
            f"{usual.strategy.value!r}: hybrid strategies and zero1 apply to whole models; set "
            "them on the outermost FSDP(...)"
        )
    given = spec.overrides.get("mixed_precision")
    if given is not None:
        precision = precision_of(given)
    return usual._replace(strategy=strategy, precision=precision)
