"""What a sharded model does with its units by hand: unshard, reshard, no_sync(), join(); and the
module as it was before.

A method applies to the unit of the module that it is called on, or to that and all below it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from zshard.model.join import join
from zshard.units.units import state_of, units_of

__all__ = ["UnitMethods", "UnshardHandle"]


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

        It shares all state with this module, but has no attribute `module` itself, so that code
        which unwraps a model in a loop terminates. If the model has a child named "module",
        returns that child.
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
