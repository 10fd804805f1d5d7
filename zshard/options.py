"""The arguments of FSDP(), parsed once: their types, checks, and the Options that they make.

A type checker accepts what the checks at run time accept: zshard's objects, their names as strings,
and torch's objects. Enums, dataclasses and policies are recognized by name and fields, so only type
checkers import torch's FSDP, which takes long to import.
"""

from __future__ import annotations

import enum
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import nn

from zshard._errors import check_choice, did_you_mean
from zshard.offload import CPUOffload, Offload, OffloadPolicy
from zshard.precision import MixedPrecision, MixedPrecisionPolicy, precision_of
from zshard.ranks.devices import CPU
from zshard.ranks.wire import Wire
from zshard.strategy import ShardingStrategy, strategy_of
from zshard.units.units import MemoryLimit, Options, Prefetch
from zshard.upper import ARGUMENTS, parse_extras
from zshard.wrap import CustomPolicy

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
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
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

_ALL = sys.maxsize  # bytes of units that stay gathered

# --- names ----------------------------------------------------------------------------------------

_F = TypeVar("_F", bound=Callable[..., Any])


def checks_names(call: str, others: Collection[str] = ()) -> Callable[[_F], _F]:
    """Decorator: an argument that `call` lacks is a TypeError that names the one that was meant.

    others: the names that the function takes as **options.
    """

    def decorate(function: _F) -> _F:
        names = {*inspect.signature(function).parameters, *others}

        @functools.wraps(function)
        def checked(*args: Any, **arguments: Any) -> Any:
            if unknown := next((name for name in arguments if name not in names), None):
                hint = did_you_mean(unknown, names)
                raise TypeError(f"{call} got an unexpected argument '{unknown}'{hint}")
            return function(*args, **arguments)

        return cast("_F", checked)

    return decorate


# --- parsing --------------------------------------------------------------------------------------


def either(**arguments: Any) -> Any:
    """Return the value that a script passes by one of two names; None if it passes neither. Raises
    ValueError if it passes both."""
    passed = [value for value in arguments.values() if value is not None]
    if len(passed) > 1:
        raise ValueError(f"pass either {' or '.join(arguments)}, not both")
    return passed[0] if passed else None


def parse_size(name: str, size: int | str, others: str = "", base: int = 1024) -> int:
    """Return an argument in bytes: a number, or a string such as "12GiB".

    name: the argument. others: what else it may be, for the message. base: that of "GB"; the base
    of "GiB" is 1024.

    Raises ValueError for a malformed size, TypeError for an argument of another type.
    """
    expected = f'{name} must be a positive number of bytes or a string such as "12GiB"{others}'
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f"{expected}, got {size!r}")
    count = 0 if isinstance(size, str) else size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:(i?)b)?\s*", str(size).lower())
    if isinstance(size, str) and match is not None:
        power = " kmgt".index(match[2] or " ")
        count = int(float(match[1]) * (1024 if match[3] else base) ** power)
    if count <= 0:
        raise ValueError(f"{expected}, got {size!r}")
    return count


# --- what FSDP() is passed ------------------------------------------------------------------------

# Arguments of FSDP(), by name; "device": where the model trains. What is missing has its default.
_Passed = Mapping[str, Any]


def check_arguments(arguments: _Passed) -> None:
    """Raise for arguments that are not options, and for a module that FSDP() cannot wrap."""
    module, init, devices = arguments["module"], arguments["param_init_fn"], arguments["device_ids"]
    if not isinstance(module, nn.Module):
        raise TypeError(f"FSDP expects an nn.Module, got {type(module).__name__}")
    if not arguments["use_orig_params"]:
        raise NotImplementedError("use_orig_params=False is not supported: omit use_orig_params")
    if init is not None and not callable(init):
        raise TypeError(f"param_init_fn must be a callable that takes a module, got {init!r}")
    buffers = arguments["forward_sync_buffers"]
    check_choice("forward_sync_buffers", buffers, (False, True, "training"))
    if devices is not None and (not isinstance(devices, list | tuple) or len(devices) != 1):
        raise ValueError(f"device_ids={devices!r}: expected a list of one GPU, that of this rank")
    at: dict[torch.device, str] = {}
    for name, param in module.named_parameters():
        if not param.is_meta:  # it is materialized later
            at.setdefault(param.device, name)
    if len(at) > 1:
        places = ", ".join(f"'{name}' on {device}" for device, name in at.items())
        raise ValueError(f"all parameters must be on one device, got {places}: move the model")


def split_ignored(
    modules: Iterable[nn.Module] | None, states: Iterable[nn.Parameter] | Iterable[nn.Module] | None
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """Return the modules and parameters that FSDP()'s ignored_modules and ignored_states
    exclude."""
    ignored_modules, ignored_params = set(modules or ()), set()
    for module in ignored_modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"ignored_modules must contain modules, got {module!r}")
    for item in states or ():
        if isinstance(item, nn.Module):
            ignored_modules.add(item)
        elif isinstance(item, nn.Parameter):
            ignored_params.add(item)
        else:
            raise TypeError(f"ignored_states must contain modules or parameters, got {item!r}")
    return ignored_modules, ignored_params


# --- the table of options -------------------------------------------------------------------------


class Option(NamedTuple):
    """A field of Options, by the argument that scripts know it by.

    parse: makes it, or raises TypeError, ValueError or NotImplementedError. compared: what of it
    must be equal on all ranks; None: nothing.
    """

    argument: str
    parse: Callable[[_Passed], Any]
    compared: Callable[[Any], str] | None = repr


def _strategy(arguments: _Passed) -> ShardingStrategy:
    strategy, older = arguments.get("strategy"), arguments.get("sharding_strategy")
    chosen = either(strategy=strategy, sharding_strategy=older)
    return strategy_of("full_shard" if chosen is None else chosen)


def _prefetch(arguments: _Passed) -> Prefetch:
    asked, device = arguments.get("backward_prefetch", "backward_pre"), arguments.get("device", CPU)
    name = asked.name if isinstance(asked, enum.Enum) else asked
    name = name.lower() if isinstance(name, str) else name
    check_choice("backward_prefetch", name, ("backward_pre", "backward_post", None))
    units = 1 if arguments.get("limit_all_gathers", True) else 2
    backward = units if name == "backward_pre" else 0
    # On GPUs a late gather stalls the GPU.
    early = arguments.get("forward_prefetch", False) or device != CPU
    return Prefetch(units if early else backward, backward)


def _offload(arguments: _Passed) -> Offload | None:
    offload = Offload.of(arguments.get("offload"))
    older = Offload.of(arguments.get("cpu_offload"), "cpu_offload")
    chosen: Offload | None = either(offload=offload, cpu_offload=older)
    return chosen and chosen.on(arguments.get("device", CPU))


def _limit(arguments: _Passed) -> MemoryLimit:
    limit: MemoryLimit = arguments.get("memory_limit", "auto")
    if limit is None or limit == "auto":
        return limit
    return parse_size("memory_limit", limit, ', "auto" or None')


def _gathered(arguments: _Passed) -> int | None:
    keep = arguments.get("keep_gathered", "auto")
    if isinstance(keep, bool):
        return _ALL if keep else 0
    if keep == "auto":
        return None if arguments.get("memory_limit", "auto") is not None else 0
    return parse_size("keep_gathered", keep, ', "auto", True or False')


OPTIONS = (
    Option("strategy", _strategy, lambda strategy: str(strategy.value)),
    Option("mixed_precision", lambda arguments: precision_of(arguments.get("mixed_precision"))),
    Option("backward_prefetch", _prefetch, None),
    # Directories may differ: each host may have its own disk.
    Option("offload", _offload, lambda offload: repr(offload and replace(offload, directory=None))),
    Option("memory_limit", _limit, lambda limit: "None" if limit is None else "given"),
    Option(
        "keep_gathered",
        _gathered,
        lambda keep: {None: "'auto'", 0: "False", _ALL: "True"}.get(keep, f"{keep} bytes"),
    ),
    Option("wire", lambda arguments: Wire.of(arguments.get("wire"))),
    Option("extras", lambda arguments: tuple(parse_extras(arguments).items()), None),
)
"""In the order of the fields of Options. Extras' arguments have rows in zshard/upper.py."""


def parse_options(arguments: _Passed) -> Options:
    """Return the options that arguments of FSDP() ask for. Raises what their parsers raise."""
    options = Options(*(option.parse(arguments) for option in OPTIONS))
    rounds = options.precision.compute or options.precision.wire or options.wire.parameters
    if rounds is not None and os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1":
        raise NotImplementedError(  # FSDP1's variable would change numbers
            "FSDP_USE_FULL_PREC_IN_EVAL=1 is not supported: unset it, or to evaluate, load "
            "model.state_dict() into a plain model"
        )
    return options


def option_facts(options: Options) -> list[tuple[str, str]]:
    """Return what ranks must agree on about a model's options."""
    facts = [
        (option.argument, option.compared(value))
        for option, value in zip(OPTIONS, options, strict=True)
        if option.compared is not None
    ]
    extras = dict(options.extras)
    return facts + [(name, repr(extras.get(name))) for name in ARGUMENTS]
