"""FSDP2's dialect: its policies in zshard's words, and the methods of its modules.

A method applies to the unit of the module that it is called on, unless it takes
`recurse`, and takes effect from the next forward or backward. The class FSDP has these methods, so
FSDP(module) and fully_shard(module) give the same modules.

Policies are recognized by their attributes and names, so torch's own are accepted as well. The
function is in `fully_shard.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from zshard import _core
from zshard.offload import Offload
from zshard.precision import BATCH_NORMS, Precision, check_dtype
from zshard.units.units import is_unit, state_of, units_of

# --- policies -------------------------------------------------------------------------------------


def precision_of(policy: Any) -> Precision:
    """Translate a MixedPrecisionPolicy. Raises ValueError for a dtype that is no floating-point
    one."""
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        check_dtype(name, getattr(policy, name))
    casts = bool(policy.cast_forward_inputs)
    return Precision(
        compute=policy.param_dtype,
        wire=policy.reduce_dtype,
        outputs=policy.output_dtype,
        cast_inputs=casts,
        cast_root_inputs=casts,
        keep=BATCH_NORMS,
        override=getattr(policy, "param_dtype_override_fn", None),
    )


def is_offload_policy(given: Any) -> bool:
    """Return whether this is an offload policy, zshard's or torch's."""
    return any(cls.__name__ == "OffloadPolicy" for cls in type(given).__mro__)


def offload_of(policy: Any) -> Offload | None:
    """Translate an offload policy."""
    to_cpu = any(cls.__name__ == "CPUOffloadPolicy" for cls in type(policy).__mro__)
    return Offload(grads=True) if to_cpu else None


# --- methods --------------------------------------------------------------------------------------


class Fsdp2Methods(nn.Module):
    """The methods of FSDP2's modules."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether forward reshards parameters, from the next forward on.

        Args:
            reshard_after_forward: True reshards them after each forward ("full_shard"); False keeps
                them unsharded until the backward ("shard_grad_op"). Over c10d the outermost unit
                is always kept, as its backward comes first.
            recurse: apply to nested units as well.

        Raises TypeError if `reshard_after_forward` is not a bool, ValueError if a unit's strategy
        is "no_shard".
        """
        _check_bool("reshard_after_forward", reshard_after_forward)
        units = [state.unit for _, state in units_of(self)] if recurse else [state_of(self).unit]
        for unit in units:
            if unit.strategy == "no_shard":
                raise ValueError(
                    f"unit '{unit.name or '(root)'}' has strategy no_shard: its parameters are not "
                    "sharded, so there is nothing to reshard"
                )
        for unit in units:
            unit.strategy = "full_shard" if reshard_after_forward else "shard_grad_op"

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over ranks by `factor` instead of by the world size.

        Applies to this unit from the next backward on. Accumulated gradients are not rescaled.

        Args:
            factor: a positive number, the same on all ranks.

        Raises ValueError if `factor` is not a positive finite number; NotImplementedError if it is
        not the world size and the unit is not sharded ("no_shard", world size 1).
        """
        state_of(self).unit.divisor = factor

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether later backwards reduce gradients (FSDP2's counterpart of no_sync).

        Takes effect at the next backward. Call it on all ranks.

        Args:
            requires_gradient_sync: False: gradients stay unreduced on their rank, as in no_sync().
            recurse: also set it for the units below this one. Default: True.
        """
        for module, state in units_of(self):
            if recurse or module is self:
                state.unit.sync = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for scripts of FSDP2; no effect: every backward completes its reductions."""
        _check_bool("is_last_backward", is_last_backward)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Accepted for scripts of FSDP2; no effect: every backward reduces over all ranks, and the
        accumulated gradient is the same. To accumulate without communication, use no_sync()."""
        _check_bool("requires_all_reduce", requires_all_reduce)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Accepted for scripts of FSDP2; no effect: every backward reshards parameters."""
        _check_bool("reshard_after_backward", reshard_after_backward)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """FSDP2's earlier name of set_gradient_divide_factor()."""
        self.set_gradient_divide_factor(factor)

    def set_modules_to_forward_prefetch(self, modules: list[nn.Module]) -> None:
        """Prefetch these modules in forward: start their all-gathers once this unit is unsharded.

        Call it on all ranks alike, after the outermost module is wrapped. Over shm it has no
        effect, as gathers there move no data.

        Args:
            modules: sharded modules of this model, any number; an empty list restores the default.

        Raises TypeError if `modules` is not a list of sharded modules, ValueError for modules of
        another model.
        """
        state_of(self).unit.prefetch(False, _prefetchable(modules))

    def set_modules_to_backward_prefetch(self, modules: list[nn.Module]) -> None:
        """Prefetch these modules in backward, instead of following the order of the last pass.

        See set_modules_to_forward_prefetch(); the default is FSDP1's backward_prefetch.
        """
        state_of(self).unit.prefetch(True, _prefetchable(modules))


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")


def _prefetchable(modules: Iterable[nn.Module]) -> list[_core.Unit]:
    if isinstance(modules, nn.Module):
        raise TypeError("modules to prefetch must be a list of sharded modules, got one module")
    return [state_of(module).unit for module in _sharded(modules, "modules to prefetch")]


def _sharded(modules: Iterable[nn.Module], what: str) -> list[nn.Module]:
    listed = list(modules)
    for module in listed:
        if not isinstance(module, nn.Module) or not is_unit(module):
            raise TypeError(
                f"{what} must be sharded, but {type(module).__name__} is not: call "
                "fully_shard(...) on it first"
            )
    return listed


def share_comm_ctx(modules: Iterable[nn.Module]) -> None:
    """Accepted for compatibility with FSDP2; no effect.

    There, several models share streams. In zshard all models over the same ranks share a transport
    anyway.

    Args:
        modules: sharded modules.

    Raises TypeError if a module is not sharded.
    """
    if isinstance(modules, nn.Module):
        raise TypeError("share_comm_ctx() expects a list of sharded modules, got one module")
    _sharded(modules, "modules of share_comm_ctx()")
