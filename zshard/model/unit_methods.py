"""Manual control of a sharded model's units: unshard, reshard, no_sync(), join() and their
settings; and the original module.

A method applies to the unit of its module, or to that unit and all below it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from zshard import _core
from zshard.model.join import join
from zshard.units.units import is_unit, state_of, units_of

__all__ = ["UnitMethods", "UnshardHandle", "check_bool", "sharded_modules"]


class UnshardHandle:
    """The handle that `unshard(async_op=True)` returns. The parameters are already unsharded."""

    def wait(self) -> None:
        """Return immediately: nothing is pending."""


class UnitMethods(nn.Module):
    """The methods of sharded models for their units."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this unit's parameters, until `reshard()` or the end of the next backward.

        Collective. Nested units are not affected. Forwards until then use the same values, and the
        parameters may also be used outside the unit's forward. They are copies: modifying them in
        place is a RuntimeError when they are resharded, and so is an optimizer step before that.
        Takes memory for the unit's full parameters.

        Args:
            async_op: return a handle with wait(). The gather is complete on return either way.

        Returns an UnshardHandle if `async_op`, else None. Raises RuntimeError during a backward,
        PeerError if a rank exited.
        """
        state_of(self).unit.pin()
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Free this unit's full parameters, from `unshard()` or kept by a forward.

        Nested units are not affected. Raises RuntimeError during the unit's forward or a backward,
        and if a parameter was modified in place since `unshard()`.
        """
        state_of(self).unit.unpin()

    @property
    def module(self) -> Any:
        """The model as an instance of its original class, for scripts written for DDP or FSDP1.

        It shares all state with this module, but has no attribute `module` of its own, so that code
        which unwraps a model in a loop terminates. If the model has a child named "module", returns
        that child.
        """
        if "module" in self._modules:
            return self._modules["module"]
        original: type[nn.Module] = type(self).__bases__[1]
        plain = object.__new__(original)
        plain.__dict__ = self.__dict__
        return plain

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward does not reduce gradients, as in DDP and FSDP1.

        Inside it, `.grad` is this rank's own, unsharded gradient, accumulated over the backwards;
        this takes memory for the full model's gradients. The next backward outside reduces the sum.
        Without no_sync(), each backward reduces and the accumulated gradient stays sharded, which
        takes no extra memory and gives the same gradient. Collective: use it on all ranks, and not
        inside a backward.
        """
        before = [(state.unit, state.unit.sync) for _, state in units_of(self)]
        for unit, _ in before:
            unit.sync = False
        try:
            yield
        finally:
            for unit, sync in before:
                unit.sync = sync

    def join(
        self,
        *optimizers: object,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Context manager for training with uneven numbers of batches, as DDP's join().

        A rank that has no more batches leaves the loop, and waits at the end of the with block
        until no rank has any. Meanwhile it contributes zeros to the others' gradients, and steps
        its shard with the param groups of the lowest rank that still has data. Afterwards the
        optimizers' options are those of that rank on all ranks.

        Collective: use it on all ranks, with the same arguments, on the outermost sharded module.

        Args:
            optimizers: all optimizers that step this model within the block. Learning rate
                schedulers and grad scalers may follow: at the end all ranks load the state that
                they have on the rank that had data last. A grad scaler that is used in the block
                must be passed.
            divide_by_initial_world_size: True (the default) divides gradients by the number of
                ranks; False by the number of ranks that still have data.
            enable: False makes this a no-op.
            throw_on_early_termination: raise RuntimeError on all ranks when one has no more data
                and others have.

        While all ranks have data, each forward, backward, clipping and step costs one small
        exchange; after that, so does each gather (over c10d) and reduction.

        Raises:
            TypeError, ValueError: an argument is no optimizer, or none of this model; or this is
                not the outermost sharded module.
            RuntimeError: join() is already active on these ranks; an optimizer that was not passed
                steps the model; or a call needs all ranks when some have no more data.
            NotImplementedError: on GPUs, and with optimizer_in_backward().
            DivergenceError: the ranks with data do different things, or another rank left the
                block by an exception, which the message names.
        """
        if not enable:
            return contextlib.nullcontext()
        return join(self, optimizers, divide_by_initial_world_size, throw_on_early_termination)

    # --- settings ---------------------------------------------------------------------------------

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
        check_bool("reshard_after_forward", reshard_after_forward)
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

    def set_modules_to_forward_prefetch(self, modules: list[nn.Module]) -> None:
        """Prefetch these modules in forward: start their all-gathers once this unit is unsharded.

        Call it on all ranks with the same modules, after the outermost module is wrapped. Over shm
        it has no effect, as gathers there move no data.

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


def check_bool(name: str, value: object) -> None:
    """Raise TypeError if the argument `name` is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")


def _prefetchable(modules: Iterable[nn.Module]) -> list[_core.Unit]:
    return [state_of(module).unit for module in sharded_modules(modules, "modules to prefetch")]


def sharded_modules(modules: Iterable[nn.Module], what: str) -> list[nn.Module]:
    """Return the modules as a list. Raises TypeError, which names `what`, if one is not sharded."""
    if isinstance(modules, nn.Module):
        raise TypeError(f"{what} must be a list of sharded modules, got one module")
    listed = list(modules)
    for module in listed:
        if not isinstance(module, nn.Module) or not is_unit(module):
            raise TypeError(
                f"{what} must be sharded, but {type(module).__name__} is not: call "
                "fully_shard(...) on it first"
            )
    return listed
