"""FSDP1's dialect: its arguments in zshard's words.

Below this file, zshard knows its own words alone: a ShardingStrategy, a Precision, a
Prefetch, an Offload. Enums, dataclasses and configs are recognized by their names and fields, so
torch's own are accepted without importing its FSDP, which takes long. The methods of its modules
are in `fsdp1_methods.py`.
"""

from __future__ import annotations

import enum
import os
from typing import Any, NamedTuple

from zshard.compat import fsdp2
from zshard.offload import Offload, offload_on, parse_offload
from zshard.precision import BATCH_NORMS, Precision, check_dtype
from zshard.ranks.devices import CPU
from zshard.ranks.wire import Wire, check_wire
from zshard.strategy import ShardingStrategy, strategy_of
from zshard.units.units import Options, Prefetch
from zshard.wrap.tree import UnitSpec

# --- arguments ------------------------------------------------------------------------------------


class Fsdp1Arguments(NamedTuple):
    """The arguments of FSDP() that say in FSDP1's words what Options say in zshard's."""

    sharding_strategy: Any
    cpu_offload: Any
    mixed_precision: Any
    backward_prefetch: Any
    forward_prefetch: Any
    limit_all_gathers: Any

    def options(self, strategy: Any, offload: Any, wire: str | Wire | None, device: str) -> Options:
        """Return the options for a model on `device`. Raises ValueError, TypeError or
        NotImplementedError for a value that zshard does not support.

        strategy, offload, wire: FSDP()'s arguments of these names, which are zshard's own.
        """
        gpu = device != CPU  # where a gather that has not gone ahead holds the GPU up
        crossing, precision = check_wire(wire, device), precision_of(self.mixed_precision)
        _check_environment(precision, crossing)
        return Options(
            _either_strategy(self.sharding_strategy, strategy),
            precision,
            prefetch_of(
                self.backward_prefetch, self.forward_prefetch or gpu, self.limit_all_gathers
            ),
            offload_on(_either_offload(offload, self.cpu_offload), device),
            wire=crossing,
        )


def check_use_orig_params(use_orig_params: bool) -> None:
    """Raise NotImplementedError for a value that zshard does not support."""
    if not use_orig_params:
        raise NotImplementedError(
            "use_orig_params=False is not supported: zshard always keeps the original parameters; "
            "omit use_orig_params"
        )


def _check_environment(precision: Precision, wire: Wire) -> None:
    """Raise NotImplementedError where FSDP1's environment variable would change numbers."""
    rounds = precision.compute or precision.wire or wire.parameters
    if rounds is not None and os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1":
        raise NotImplementedError(
            "FSDP_USE_FULL_PREC_IN_EVAL=1 is not supported: unset it; to evaluate in full "
            "precision, load model.state_dict() into a model that is not sharded"
        )


def _either_strategy(sharding_strategy: Any, strategy: Any) -> ShardingStrategy:
    if sharding_strategy is not None and strategy is not None:
        raise ValueError("pass either sharding_strategy or strategy (its short name), not both")
    given = strategy if strategy is not None else sharding_strategy
    return ShardingStrategy.FULL_SHARD if given is None else strategy_of(given)


def precision_of(given: Any) -> Precision:
    """Translate a MixedPrecision or, as FSDP() takes both, FSDP2's policy. None: nothing is cast.

    Raises TypeError for any other object, ValueError for a dtype that is not floating-point,
    NotImplementedError for keep_low_precision_grads.
    """
    if given is None:
        return Precision()
    if not hasattr(given, "param_dtype") or not hasattr(given, "reduce_dtype"):
        raise TypeError(
            "mixed_precision must be a MixedPrecision or MixedPrecisionPolicy, zshard's or "
            f"torch's, got {given!r}"
        )
    if hasattr(given, "output_dtype"):
        return fsdp2.precision_of(given)
    if getattr(given, "keep_low_precision_grads", False):
        raise NotImplementedError(
            "keep_low_precision_grads=True is not supported: gradients have the parameters' dtype; "
            "omit keep_low_precision_grads"
        )
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        check_dtype(name, getattr(given, name, None))
    casts = bool(given.cast_forward_inputs)
    keep = getattr(given, "_module_classes_to_ignore", None)
    return Precision(
        compute=given.param_dtype,
        wire=given.reduce_dtype,
        buffers=getattr(given, "buffer_dtype", None),
        cast_inputs=casts,
        cast_root_inputs=casts or bool(getattr(given, "cast_root_forward_inputs", False)),
        keep=BATCH_NORMS if keep is None else tuple(keep),
    )


def prefetch_of(backward_prefetch: Any, forward_prefetch: Any, limit_all_gathers: Any) -> Prefetch:
    """Translate the three arguments about prefetching. Raises ValueError for an unknown value."""
    name = backward_prefetch
    if isinstance(name, enum.Enum):
        name = name.name
    if isinstance(name, str):
        name = name.lower()
    if name not in (None, "backward_pre", "backward_post"):
        raise ValueError(
            "backward_prefetch must be 'backward_pre', 'backward_post' or None, got "
            f"{backward_prefetch!r}"
        )
    units = 1 if limit_all_gathers else 2
    backward = units if name == "backward_pre" else 0
    asked = bool(forward_prefetch)
    return Prefetch(units if asked else backward, backward, asked)


def _either_offload(offload: Any, cpu_offload: Any) -> Offload | None:
    cpu = offload_of(cpu_offload)
    if offload is not None and cpu is not None:
        raise ValueError("pass either offload or cpu_offload, not both")
    return parse_offload(offload) or cpu


def offload_of(cpu_offload: Any) -> Offload | None:
    """Translate a bool, a CPUOffload or, as FSDP() takes both, FSDP2's policy. None: everything
    stays in memory. Raises TypeError for anything else."""
    if cpu_offload is None or cpu_offload is False:
        return None
    if cpu_offload is True:
        return Offload()
    if isinstance(cpu_offload, Offload):
        return cpu_offload
    params = getattr(cpu_offload, "offload_params", None)
    if isinstance(params, bool):
        return Offload(grads=True) if params else None
    if fsdp2.is_offload_policy(cpu_offload):
        return fsdp2.offload_of(cpu_offload)
    raise TypeError(
        "cpu_offload must be a bool, torch's CPUOffload or CPUOffloadPolicy, or a zshard.Offload, "
        f"got {cpu_offload!r}"
    )


def unit_options(spec: UnitSpec, usual: Options) -> Options:
    """Return the model's options with a CustomPolicy's overrides for this unit. Raises ValueError
    for an override that only applies to a whole model."""
    strategy: ShardingStrategy = usual.strategy
    precision: Precision = usual.precision
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
