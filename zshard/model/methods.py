"""The methods that sharding adds to a module, and methods that are treated like its forward.

Each passes on the unit of its module, or that unit and all below it, to what implements it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from zshard import _core, upper
from zshard.memory.report import memory_of, summary_of
from zshard.model.own_names import ModelNamesFirst, yields_to_the_model
from zshard.optim.clip import clip_grad_norm
from zshard.optim.in_backward import OptimizerInBackward
from zshard.precision import cast_arguments
from zshard.units.extensions import EXTENSIONS
from zshard.units.open_forwards import call_between_hooks, call_guarded
from zshard.units.units import class_of, is_unit, state_of, units_of
from zshard.wrap.meta import rewind

_Batch = TypeVar("_Batch")


class UnshardHandle:
    """The handle that `unshard(async_op=True)` returns. The parameters are already unsharded."""

    def wait(self) -> None:
        """Return immediately: nothing is pending."""


class GradientReductionHandle(UnshardHandle):
    """The handle that `finalize_backward(async_op=True)` returns. Gradients are already reduced."""


_moves_to: ContextVar[tuple[Any] | None] = ContextVar("zshard_to_empty", default=None)
"""The device that to_empty() moves tensors to, which it does not empty."""


@yields_to_the_model
class ModelMethods(ModelNamesFirst):
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
        rewind()
        token = _moves_to.set((device,))
        try:
            return super().to_empty(device=device, recurse=recurse)
        finally:
            _moves_to.reset(token)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Call `fn` on each tensor, as nn.Module; within to_empty(), on those without memory."""
        moves_to = _moves_to.get()

        def empty(tensor: Tensor) -> Tensor:
            return fn(tensor) if tensor.is_meta or moves_to is None else tensor.to(*moves_to)

        return super()._apply(fn if moves_to is None else empty, recurse)  # type: ignore[no-untyped-call]

    def micro_batches(self, step: int, seed: int = 0) -> Iterator[int]:
        """Yield the numbers of the micro-batches that this rank computes in a step, from 0 to
        micro_batches - 1: `for index in model.micro_batches(step): ...`.

        The random number generators are seeded for each of them, from `seed`, `step` and its
        number, and after the last one. Run one forward and one backward for each, on the samples
        that belong to (step, number), without dividing the loss. Where the ranks do not divide the
        micro-batches evenly, some compute their first one twice; its gradient counts once.

        Begins the step anew if an earlier one was not completed. Raises RuntimeError for a model
        without deterministic="any-world", ValueError for an inner unit.
        """
        extra = upper.module_for("micro_batches")
        return cast("Iterator[int]", extra.micro_batches_in(self, step, seed))

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

        Returns the norm before scaling, a 0-dim tensor, bit-identical on all ranks.
        Raises RuntimeError if the norm is NaN or infinite and `error_if_nonfinite` is set, if
        parameters are stepped in backward, or if the script replaced a sharded parameter's .grad;
        ValueError if `norm_type` is not positive.
        """
        return clip_grad_norm(list(self.parameters()), max_norm, norm_type, error_if_nonfinite)

    def optimizer_in_backward(self, *optimizers: torch.optim.Optimizer) -> OptimizerInBackward:
        """Step each unit's parameters during backward, as soon as its gradients are reduced.

        Call it on all ranks, once the entire model is wrapped, and not between a forward and its
        backward.

        Args:
            optimizers: zshard.AdamW, Adam or SGD, over all parameters of this module or some. Other
                parameters keep their `.grad` for optimizer.step().

        After a backward, stepped parameters have no `.grad` and the values that optimizer.step()
        would give them, bit for bit. Set learning rates before backward. Within no_sync() nothing
        is stepped; the next backward outside steps with the sum. optimizer.step() steps what has a
        `.grad`, so training loops need no change. Hooks of register_post_accumulate_grad_hook run
        before the step and may modify `.grad` in place.

        A unit is stepped while backward runs if every rank called its module exactly once since the
        last backward and it has no frozen sharded parameters; other units at the end of backward.

        If a backward raises, some units may have been stepped: resume from a checkpoint. Clipping
        by norm, GradScaler, and a parameter whose part of the graph is needed again after its step
        are a RuntimeError.

        Returns a handle with remove(). Raises TypeError for other optimizers; ValueError if none of
        the parameters belong to this module; RuntimeError if a parameter has a `.grad` or is
        already stepped in backward; NotImplementedError with FSDP(nonfinite=...) or
        check_replicas=....
        """
        return OptimizerInBackward(self, optimizers)

    def summary(self) -> str:
        """Return two tables as text: the units (name, parameters, full and per-rank bytes,
        strategy, transport), and the model's memory by part in MiB (predicted, now and peak)."""
        return summary_of(self)

    def memory(self, what: str = "now") -> dict[str, int]:
        """Return the bytes that the model takes on this rank, by part.

        Args:
            what: "now" (the default): what zshard holds now. "peak": the maximum of each part, and
                of their total, since the model was wrapped. "predicted": what a step takes with the
                current settings, if modules run in the order in which they are registered; from
                the first no_sync() on, with the full gradients of micro-batches within it.

        Returns:
            A dict of bytes:

            "shards", "grads", "slots", "buckets": parameters, gradients, gathered full parameters,
                and gradients on their way to the reduction.
            "kept": the secondary shards of zero1 and hybrid_full, which stay between steps.
            "transport": buffers of the transport, which all models of a process group share.
            "optimizer": the state of this module's parameters in all optimizers that have made a
                step. "predicted": Adam's state, until an optimizer has made one.
            "offloaded": what an Offload keeps in files, or for a GPU in host memory.
            "total": the sum of the parts, without "offloaded".

            All parts but "optimizer" are those of the whole model, with units that have a process
            group of their own. Memory is reserved before the first step, except for gradients,
            which take theirs from backward to zero_grad(); full ones (no_shard) count as the
            script's from the end of backward on.

        Raises ValueError if `what` is something else.
        """
        return memory_of(self, what)

    def metrics(self) -> dict[str, float]:
        """Return what this rank knows of the last step, as numbers for a logger.

        Call it after optimizer.step(), as often as you log; it communicates nothing.

        Returns:
            A dict for TensorBoard or Weights & Biases. Entries are missing until they are known, so
            read them with .get(): seconds and bytes need two optimizer steps. Tokens/s and MFU need
            the batch size: examples/metrics.py has them.

            "seconds/step": between the last two optimizer steps, each the first after a backward,
                with all that the script did between them, such as validation and saving.
            "seconds/wait": of these, what this process waited for other ranks or for bytes on their
                way, in all its models. What a GPU waits in its queue does not count.
            "bytes/gather", "bytes/reduce": what this process received from other ranks in that
                time, in all its models: of parameters and of gradients (under no_shard, of their
                sums also), without headers. Over shm, "reduce" is what it read of the gradients of
                others; a gather moves nothing there.
            "bytes/gather_other_hosts", "bytes/reduce_other_hosts": of these, from other hosts.
                Hosts that have different numbers of ranks count as one.
            "grad_norm": the norm before clipping, of the last clip_grad_norm_() of the model,
                whichever function did it. On GPUs, reading it waits for the GPU.
            "steps/skipped": how many optimizer steps FSDP(nonfinite="skip") has skipped.
            "memory/now/total", "memory/peak/total", ...: the parts of memory(), in bytes.
        """
        state = state_of(self)
        numbers = _core.pace(state.unit.engine)
        if state.model.norm is not None:
            numbers["grad_norm"] = float(state.model.norm)
        for each in EXTENSIONS:
            numbers.update(each.metrics(self))
        for what in ("now", "peak"):
            for part, size in ModelMethods.memory(self, what).items():
                numbers[f"memory/{what}/{part}"] = float(size)
        return numbers

    # --- units ------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this unit's parameters, until `reshard()` or the end of the next backward.

        Collective. Nested units are not affected. Forwards until then use the same values, and the
        parameters may also be used outside the unit's forward. They are copies: modifying them in
        place, except within `summon_full_params()`, is a RuntimeError when they are resharded, and
        so is an optimizer step before that.
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
        which unwraps a model in a loop terminates.
        """
        plain = object.__new__(class_of(self))
        plain.__dict__ = self.__dict__
        return plain

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward does not reduce gradients, as in DDP and FSDP1.

        Inside it, `.grad` is this rank's own, unsharded gradient, accumulated over the backwards in
        the parameter's dtype; this takes memory for the full model's gradients. The next backward
        outside reduces the sum, which mixed precision casts once, as it is sent.
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

    def join(self, *loader: Iterable[_Batch], **removed: object) -> Iterable[_Batch]:
        """Iterate over this rank's batches until one of the ranks has no more, so that no rank
        waits for one that has stopped: `for batch in model.join(loader)`.

        All ranks end in the same step. The batches that other ranks still have are dropped; one of
        them may have been taken from the loader. Before each batch, the ranks exchange a few bytes.
        Collective: iterate on all ranks.

        Args:
            loader: one iterable of batches, which may have another length on each rank, or no end.
                The result can be iterated again if the loader can.

        Raises:
            TypeError: an argument that is no iterable, such as an optimizer; the model is not
                sharded.
            Exception: what the loader raises on one rank is raised there, and with the same text
                on the others.
            DivergenceError, PeerError: another rank has left the loop by itself.
        """
        return cast("Iterable[_Batch]", upper.module_for("join").Join(self, loader, removed))

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
                    f"unit '{unit.name or '(root)'}' has strategy no_shard, which never reshards: "
                    "call set_reshard_after_forward() on other units only"
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


def check_bool(name: str, value: object) -> None:
    """Raise TypeError if the argument `name` is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")


def _prefetchable(modules: Iterable[nn.Module]) -> list[_core.Unit]:
    """Return the modules' units. Raises TypeError if one is not sharded."""
    listed: list[Any] = [None] if isinstance(modules, nn.Module) else list(modules)
    for module in listed:
        if not isinstance(module, nn.Module) or not is_unit(module):
            kind = type(modules if module is None else module).__name__
            raise TypeError(f"modules to prefetch must be a list of sharded modules, got a {kind}")
    return [state_of(module).unit for module in listed]
