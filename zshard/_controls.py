"""What a script may set of a sharded module, or do with it by hand, in FSDP2's words.

The one idea: these methods are for the unit of the module that they are called on, unless they say
`recurse`; each of them changes what happens from the next forward or backward on. The class FSDP
has them, so that both spellings, FSDP(module) and fully_shard(module), give the same modules.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from zshard import _core
from zshard._in_backward import OptimizerInBackward
from zshard._optim_names import OptimStateMethods
from zshard._units import state_of, units_of


class UnshardHandle:
    """What `unshard(async_op=True)` returns. The parameters are whole already."""

    def wait(self) -> None:
        """Returns at once."""


class Controls(OptimStateMethods, nn.Module):
    """The part of FSDP that FSDP2's scripts know, and what has to do with optimizers."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Makes this unit's parameters whole, until `reshard()` or the end of the next backward.

        For all ranks together; units below this one stay as they are. Forwards in between use the
        same values, and the parameters may be used outside of the unit's forward as well. They are
        copies: an in-place change is a RuntimeError at the end, and so is an optimizer's step
        before it. Takes memory for the unit's whole parameters.

        async_op: return a handle with wait(); there is nothing left to wait for.
        Raises RuntimeError in a backward; PeerError if a rank is gone.
        """
        state_of(self).unit.hold()
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Gives this unit's whole parameters back, whether from `unshard()` or kept by a forward.

        Units below this one stay as they are. Raises RuntimeError in the unit's forward and in a
        backward, and where a parameter was changed in place since `unshard()`.
        """
        state_of(self).unit.let_go()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are given back after each forward ("full_shard") or kept for the
        backward ("shard_grad_op"), from the next forward on.

        recurse: units below this one as well. Over c10d the outermost unit is kept either way, as
        its backward comes first. Raises TypeError for anything but a bool; ValueError for a unit of
        the strategy "no_shard".
        """
        if not isinstance(reshard_after_forward, bool):
            raise TypeError(f"reshard_after_forward is a bool, not {reshard_after_forward!r}")
        units = [state.unit for _, state in units_of(self)] if recurse else [state_of(self).unit]
        for unit in units:
            if unit.strategy == "no_shard":
                raise ValueError(
                    f"unit '{unit.name or '(root)'}' has the strategy no_shard: its parameters are "
                    "always whole, there is nothing to reshard"
                )
        for unit in units:
            unit.strategy = "full_shard" if reshard_after_forward else "shard_grad_op"

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What the sum of the ranks' gradients is divided by, in place of the number of ranks.

        For this unit, from the next backward on; give all ranks the same. Gradients that are there
        already (accumulation) stay as they are. Raises ValueError unless `factor` is a positive
        number; NotImplementedError for another one than the number of ranks where a unit is not
        sharded ("no_shard", a world of one).
        """
        state_of(self).unit.divisor = factor

    def optimizer_in_backward(self, *optimizers: torch.optim.Optimizer) -> OptimizerInBackward:
        """Has each unit's parameters stepped in backward, as soon as its gradients are reduced.

        optimizers: zshard.AdamW, Adam or SGD, together over all parameters of this module or over
        some; their groups as they are now. Others keep their `.grad` for optimizer.step(). Call it
        on all ranks, after the model is wrapped as a whole and not between a forward and its
        backward. Returns a handle with remove().

        After a backward the stepped parameters have no `.grad`, and their values are those, to the
        bit, that optimizer.step() after it would give; options are read when a unit is stepped, so
        set learning rates before backward. optimizer.step() steps what has a `.grad`: nothing, if
        all is stepped in backward, so a loop or scheduler that calls it goes on as it was. In
        no_sync() nothing is stepped; the next synced backward steps with the sum. Without it, each
        backward is a step. Hooks of register_post_accumulate_grad_hook run before the step, and
        may change `.grad` in place.

        Memory: gradients borrow a slot (`memory()["slots"]`) from their sum to the step. A unit is
        stepped while backward goes on if its module was called once since the last backward on
        every rank, and it has no frozen parameters that are sharded; other units at the end of
        backward, when no rank reads them any more.

        A backward that raises may have stepped some units, the same on all ranks when the next
        forward begins: go on from a checkpoint. Not possible with it, and a
        RuntimeError: clipping by norm, GradScaler, a parameter whose part of the graph is needed
        again after its step. Raises TypeError for other optimizers, ValueError where none of the
        parameters is this module's, RuntimeError for a parameter that has a `.grad` or is stepped
        in backward already.
        """
        return OptimizerInBackward(self, optimizers)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Taken and without effect: each backward ends all its reductions, the last or not."""
        if not isinstance(is_last_backward, bool):
            raise TypeError(f"is_last_backward is a bool, not {is_last_backward!r}")

    def set_modules_to_forward_prefetch(self, modules: list[nn.Module]) -> None:
        """Has the gathers of these units begin as soon as this one is whole in forward, however
        many they are; an empty list takes that back.

        For all ranks alike, and after the outermost module was wrapped. Over shm no gather moves a
        byte, so there is nothing to begin early. Raises TypeError for anything but a list of
        sharded modules, ValueError for modules of another model.
        """
        state_of(self).unit.prefetch(False, _prefetchable(modules))

    def set_modules_to_backward_prefetch(self, modules: list[nn.Module]) -> None:
        """The same in backward, instead of what the last pass shows (FSDP1's backward_prefetch)."""
        state_of(self).unit.prefetch(True, _prefetchable(modules))


def _prefetchable(modules: Iterable[nn.Module]) -> list[_core.Unit]:
    if isinstance(modules, nn.Module):
        raise TypeError("modules to prefetch are a list of sharded modules, not one module")
    for module in modules:
        if not isinstance(module, Controls):
            raise TypeError(
                f"modules to prefetch are sharded modules; {type(module).__name__} is not one: "
                "call fully_shard(...) on it first"
            )
    return [state_of(module).unit for module in modules]
