"""The methods that FSDP2 gives to sharded modules, and those that concern optimizers.

The one idea: a method applies to the unit of the module that it is called on, unless it takes
`recurse`, and takes effect from the next forward or backward. The class FSDP has these methods, so
FSDP(module) and fully_shard(module) give the same modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zshard import _core
from zshard._model.join import join
from zshard._optim.in_backward import OptimizerInBackward
from zshard._state_dict.optimizer_names import OptimStateMethods
from zshard._units.units import state_of, units_of


class UnshardHandle:
    """The handle that `unshard(async_op=True)` returns. The parameters are already unsharded."""

    def wait(self) -> None:
        """Return immediately: nothing is pending."""


class Controls(OptimStateMethods, nn.Module):
    """The methods of FSDP2's modules, and those that concern optimizers."""

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward reduces gradients, as scripts for DDP set it instead of using no_sync():
        False is set_requires_gradient_sync(False)."""
        return bool(state_of(self).unit.sync)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        for _, state in units_of(self):
            state.unit.sync = bool(value)

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
        if not isinstance(reshard_after_forward, bool):
            raise TypeError(f"reshard_after_forward must be a bool, got {reshard_after_forward!r}")
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

    def optimizer_in_backward(self, *optimizers: torch.optim.Optimizer) -> OptimizerInBackward:
        """Step each unit's parameters during backward, as soon as its gradients are reduced.

        Call it on all ranks, once the whole model is wrapped, and not between a forward and its
        backward.

        Args:
            optimizers: zshard.AdamW, Adam or SGD. Together they may cover all parameters of this
                module or some; their param groups are read now. Other parameters keep their
                `.grad` for optimizer.step().

        After a backward, stepped parameters have no `.grad`, and their values are bit-identical to
        those of an optimizer.step() after the backward. Options are read when a unit is stepped, so
        set learning rates before backward. Each backward is a step; within no_sync() nothing is
        stepped, and the next backward outside steps with the sum. optimizer.step() still steps
        every parameter with a `.grad`: none, if all are stepped in backward, so training loops and
        schedulers that call it need no change. Hooks of register_post_accumulate_grad_hook run
        before the step and may modify `.grad` in place.

        Memory: gradients occupy a slot (`memory()["slots"]`) between reduction and step. A unit is
        stepped while backward runs if every rank called its module exactly once since the last
        backward and it has no frozen sharded parameters; other units are stepped at the end of
        backward, when no rank reads them any more.

        If a backward raises, some units may have been stepped (the same ones on all ranks by the
        next forward): resume from a checkpoint. Clipping by norm, GradScaler, and a parameter
        whose part of the graph is needed again after its step are a RuntimeError.

        Returns a handle with remove(). Raises TypeError for other optimizers; ValueError if none of
        the parameters belong to this module; RuntimeError if a parameter has a `.grad` or is
        already stepped in backward.
        """
        return OptimizerInBackward(self, optimizers)

    def join(
        self,
        *optimizers: Any,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Context manager for training with uneven numbers of batches, as DDP's join().

        A rank that has no more batches leaves the loop, and waits at the end of the with block
        until no rank has any. Meanwhile it does its part of what the others do: it contributes
        zeros to gradients, and steps its shard with the param groups of the lowest rank that still
        has data. Afterwards the optimizers' options are those of that rank on all ranks.

        Collective: use it on all ranks, with the same arguments, on the outermost sharded module.

        Args:
            optimizers: all optimizers that step this model within the block. Learning rate
                schedulers and grad scalers may follow: at the end all ranks load the state that
                they have on the rank that had data last. (Grad scalers that were used are found
                without being passed.)
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

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for compatibility with FSDP2; no effect.

        Every backward completes all its reductions. Raises TypeError if not given a bool.
        """
        if not isinstance(is_last_backward, bool):
            raise TypeError(f"is_last_backward must be a bool, got {is_last_backward!r}")

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


def _prefetchable(modules: Iterable[nn.Module]) -> list[_core.Unit]:
    if isinstance(modules, nn.Module):
        raise TypeError("modules to prefetch must be a list of sharded modules, got one module")
    for module in modules:
        if not isinstance(module, Controls):
            raise TypeError(
                f"modules to prefetch must be sharded, but {type(module).__name__} is not: call "
                "fully_shard(...) on it first"
            )
    return [state_of(module).unit for module in modules]
