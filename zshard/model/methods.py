"""Methods that sharding adds to a module: clipping, steps in backward, its memory; and methods that
are treated like its forward.

Each method collects the model's units and passes them to the module that implements it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zshard.memory.report import memory_of, memory_table, summary_of
from zshard.optim.clip import clip_grad_norm
from zshard.optim.in_backward import OptimizerInBackward
from zshard.precision import cast_arguments
from zshard.units.open_forwards import call_between_hooks, call_guarded
from zshard.units.units import is_unit, state_of, units_of
from zshard.wrap.meta import rewind

__all__ = ["ModelMethods", "call_as_forward", "register_forward_method"]


class ModelMethods(nn.Module):
    """The methods of sharded models that are zshard's own."""

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Any:
        """Give memory to tensors on the meta device; all others keep their values.

        A sharded model has no parameters on the meta device: sharding initialized them. Scripts for
        FSDP2 may call this, but need not. Such scripts initialize next, so this takes back the
        random numbers that sharding drew: the script then draws what a plain model would.

        Args:
            device: the device that the model is on.
            recurse: include the modules below. Default: True.

        Returns self.
        """

        def given(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

        rewind()
        return self._apply(given, recurse=recurse)  # type: ignore[no-untyped-call]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients in place so that their global norm is at most `max_norm`.

        On GPUs the host does not wait for the norm, unless `error_if_nonfinite` is set.
        Collective: call it on all ranks.

        Args:
            max_norm: the largest norm allowed.
            norm_type: the order of the norm, a positive number or inf. Default: 2.0.
            error_if_nonfinite: raise an error if the norm is NaN or infinite. Default: False.

        Returns:
            The norm before scaling, a 0-dim tensor, bit-identical on all ranks.

        Raises:
            RuntimeError: the norm is NaN or infinite and `error_if_nonfinite` is set; parameters
                are stepped in backward; or the script replaced a sharded parameter's .grad.
            ValueError: `norm_type` is not positive.
        """
        return clip_grad_norm(list(self.parameters()), max_norm, norm_type, error_if_nonfinite)

    def optimizer_in_backward(self, *optimizers: torch.optim.Optimizer) -> OptimizerInBackward:
        """Step each unit's parameters during backward, as soon as its gradients are reduced.

        Call it on all ranks, once the entire model is wrapped, and not between a forward and its
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

    def summary(self) -> str:
        """Return two tables as text: the units (name, parameters, full and per-rank bytes,
        strategy, transport), and the model's memory by part in MiB (predicted, now and peak)."""
        own = state_of(self)
        units = summary_of([state for _, state in units_of(self)], own.comms, own.options.wire)
        return f"{units}\n\n{memory_table(self)}"

    def memory(self, what: str = "now") -> dict[str, int]:
        """Return the bytes that the model takes on this rank, by part.

        Args:
            what: "now" (the default): what zshard holds now. "peak": the maximum of each part, and
                of their total, since the model was wrapped (including unshard() and the gradients
                of no_sync()). "predicted": what a step takes with the current settings, if modules
                run in the order in which they are registered.

        Returns:
            A dict of bytes:

            "shards", "grads", "slots", "buckets": parameters, gradients, gathered full parameters,
                and gradients on their way to the reduction.
            "kept": the secondary shards of zero1 and hybrid_full, which stay between steps.
            "transport": buffers of the transport (c10d: what is sent and received; shm: the ranks'
                mailboxes). They are allocated once per process group and serve all its models, so
                do not add them up over models. "predicted" counts those of a new transport.
            "optimizer": the state of this module's parameters in all optimizers that have made a
                step. "predicted": Adam's state, until an optimizer has made one.
            "offloaded": what an Offload keeps in files, or for a GPU in host memory. It is not part
                of the other numbers.
            "total": the sum of the parts, without "offloaded".

            All parts but "optimizer" are those of the whole model. Units below this module that
            have a process group of their own are counted, too ("peak": with their own peaks). A
            step's memory is reserved before the first step, so "now" equals "predicted" except for
            the optimizer's state. Memory counts once it is reserved; the system provides it when it
            is first touched.

        Raises:
            ValueError: `what` is something else.
        """
        return memory_of(self, what)


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat a method of a sharded module like its forward: all-gather parameters around it.

    For methods such as `forward_features` or `encode`. Gradients are reduced as after a forward.
    Methods that call the modules, like transformers' `generate`, do not need it.

    Args:
        module: a module wrapped by FSDP; any other module is ignored.
        method_name: name of the method. It is replaced on the module's class, that is, for all
            modules of that class.

    Raises AttributeError if the class lacks the method.
    """
    if not is_unit(module):
        return
    original = getattr(type(module), method_name)
    if hasattr(original, "_zshard_original"):
        return

    @functools.wraps(original)
    def method(self: nn.Module, *args: object, **kwargs: object) -> Any:
        return call_as_forward(self, functools.partial(original, self), args, kwargs)

    method._zshard_original = original  # type: ignore[attr-defined]
    setattr(type(module), method_name, method)


def call_as_forward(
    module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return function(*args, **kwargs), treated like the forward of `module`, which is a unit."""
    unit = state_of(module).unit
    if not unit.is_hooked:
        return function(*args, **kwargs)
    args, kwargs = cast_arguments(module, args, kwargs)
    return call_guarded(
        module, unit, call_between_hooks, (module, unit, function, args, kwargs), {}
    )
