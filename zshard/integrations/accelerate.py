"""Accelerate: `shard(accelerator)` makes prepare() shard models with zshard instead of wrapping
DDP.

    accelerator = Accelerator()
    zshard.accelerate.shard(accelerator)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

The accelerator stays the same object; its class becomes a subclass of its own. There,
prepare_model() calls FSDP(model) and then the original method, as for a model without DDP, so
autocast and torch.compile still apply. Everything else that an Accelerator does reaches the model
through methods that FSDP also has (state_dict, clipping).
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zshard.api import (
    ARGUMENTS,
    FSDP,
    bare,
    broadcast_buffers,
    did_you_mean,
    gather,
    load,
    ranks_of,
    save,
)

__all__ = ["shard"]

_FOLDER = "zshard_model"  # a model and its optimizer, in the folder of save_state()
_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU")  # kinds of training for which prepare() wraps DDP


def shard(accelerator: Any, **arguments: object) -> Any:
    """Make an Accelerator shard the models that it prepares from now on, instead of wrapping DDP.

    Models that are already sharded stay as they are. Call it on all ranks, before `prepare()`.

    Args:
        accelerator: an accelerate.Accelerator, for CPUs or GPUs, without its own FSDP, DeepSpeed or
            Megatron-LM plugin.
        arguments: those of FSDP() for all models, such as strategy and auto_wrap_policy.

    Returns:
        `accelerator` itself. Its save_state() has all ranks write, each its own shards, and its
        load_state() also loads what it saved under DDP, on any number of ranks.

    Raises:
        TypeError: `accelerator` is something else, or an argument is not one of FSDP().
        RuntimeError: the accelerator already shards, or has prepared a model.
        ValueError: the accelerator shards with a plugin, or has a communication hook for DDP.
    """
    _check_accelerator(accelerator)
    check_arguments("zshard.accelerate.shard()", arguments)
    accelerator._zshard_arguments = arguments
    return _sharding(accelerator)


def _sharding(accelerator: object) -> Any:
    kind = type(accelerator)
    names = {"__module__": kind.__module__}
    accelerator.__class__ = type(kind.__name__, (_ShardingAccelerator, kind), names)
    return accelerator


def _unpickled(kind: type[Any], state: dict[str, Any]) -> Any:
    accelerator: object = object.__new__(kind)
    accelerator.__dict__.update(state)
    return _sharding(accelerator)


def check_arguments(call: str, arguments: Mapping[str, Any]) -> None:
    """Raise TypeError if FSDP(model, **arguments) lacks one of them."""
    for name in arguments.keys() - ARGUMENTS:
        hint = did_you_mean(name, ARGUMENTS)
        raise TypeError(f"{call} takes the arguments of FSDP(), which has no {name!r}{hint}")


def _check_accelerator(accelerator: Any) -> None:
    if not hasattr(accelerator, "prepare_model") or not hasattr(accelerator, "distributed_type"):
        kind = type(accelerator).__name__
        raise TypeError(f"shard() expects an accelerate.Accelerator, got {kind}")
    if isinstance(accelerator, _ShardingAccelerator) or accelerator._models:
        raise RuntimeError(
            "this Accelerator has a model or shards already: call zshard.accelerate.shard() once, "
            "before accelerator.prepare()"
        )
    kind = accelerator.distributed_type.value
    hook = getattr(getattr(accelerator.ddp_handler, "comm_hook", None), "value", "no")
    plugins = {  # On CPUs, Accelerate silently drops the FSDP plugin, which sets the variable.
        "torch's FSDP (del os.environ['ACCELERATE_USE_FSDP'] after TrainingArguments(fsdp=...))": (
            os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        ),
        f"{kind}": kind not in _KINDS,
        f"DDP's communication hook {hook}": hook != "no",
    }
    for plugin in (plugin for plugin, is_set in plugins.items() if is_set):
        raise ValueError(f"this Accelerator is configured for {plugin}: remove that")


_Accelerator: Any = object  # the accelerator's class follows this one in the MRO


class _ShardingAccelerator(_Accelerator):  # type: ignore[misc]
    """Mixin that precedes an Accelerator's own class."""

    _zshard_arguments: dict[str, Any]
    _models: list[Any]
    _optimizers: list[Any]
    _zshard_evaluates_wrapped = True  # evaluation uses DDP's wrapper; a Trainer's does not

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Shard a model, also one for evaluation, then continue as Accelerate does for one
        process."""
        if not getattr(model, "_is_accelerate_prepared", False):
            if not _is_sharded(model):
                arguments = {"forward_sync_buffers": "training", **self._zshard_arguments}
                if self.device.type == "cuda" and device_placement is not False:
                    arguments.setdefault("device_id", self.device)
                FSDP(bare(model), **arguments)
            device_placement, evaluation_mode = False, True  # FSDP() has moved the model; skip DDP
        return super().prepare_model(model, device_placement, evaluation_mode)

    def backward(self, loss: torch.Tensor, **kwargs: object) -> None:
        """Run a backward, then broadcast buffers: an evaluation under DDP would start with that
        broadcast, but here one rank may evaluate alone."""
        super().backward(loss, **kwargs)
        if self.sync_gradients and self._zshard_evaluates_wrapped:
            for model in filter(_is_sharded, self._models):
                broadcast_buffers(bare(model))

    def no_sync(self, model: nn.Module) -> Any:
        """Context manager in which backward does not reduce the model's gradients. Accelerate's own
        would call a method of the model, which may have another one of that name."""
        sharded: Any = bare(model)
        return FSDP.no_sync(sharded) if _is_sharded(model) else super().no_sync(model)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: object
    ) -> Any:
        """Save as Accelerate does, but save sharded models and their optimizers with zshard.save().

        With ProjectConfiguration(save_on_each_node=True), each host writes its own part to its own
        disk (save(per_host=True)), into a new folder. If the script has registered a hook, which
        receives the models and full state dicts, Accelerate saves everything.
        """
        if self._save_model_state_pre_hook:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        pairs = _pairs(self)
        own_disks = self.project_configuration.save_on_each_node
        how: dict[str, Any] = {"per_host": True} if own_disks else {"overwrite": True}

        def write(models: object, weights: object, folder: str) -> None:
            for i, (model, optimizer) in enumerate(pairs):
                save(_folder(folder, i), model, optimizer, **how)

        models, optimizers = self._models, self._optimizers
        saved = [optimizer for _, optimizer in pairs]
        self._models = [model for model in models if not _is_sharded(model)]
        self._optimizers = [each for each in optimizers if _inner(each) not in saved]
        try:
            with self.register_save_state_pre_hook(write):
                return super().save_state(output_dir, safe_serialization, **kwargs)
        finally:
            self._models, self._optimizers = models, optimizers

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Load what save_state() saved, here or under DDP, on any number of ranks."""
        pairs = _pairs(self)
        optimizers = list(self._optimizers)

        def read(models: list[nn.Module], folder: str) -> None:
            for i, (model, optimizer) in enumerate(pairs):
                if model not in models:  # a hook of the script has loaded it
                    continue
                if any(gather(ranks_of(bare(model)), os.path.isdir(_folder(folder, i)))):
                    load(_folder(folder, i), model, optimizer)
                    others = [each for each in self._optimizers if _inner(each) is not optimizer]
                    self._optimizers[:] = others
                else:
                    _load_weights(Path(folder), self._models.index(model), model)
                models.remove(model)

        try:
            with self.register_load_state_pre_hook(read):
                super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            self._optimizers[:] = optimizers

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """As for other ways to shard, without effect on sharded models."""
        if any(isinstance(each, nn.Module) and _is_sharded(each) for each in joinables):
            warnings.warn(
                "join_uneven_inputs() has no effect on sharded models: give all ranks as many "
                "batches, or loop over FSDP.join(model, dataloader)",
                stacklevel=3,
            )
            yield
            return
        with super().join_uneven_inputs(joinables, even_batches):
            yield

    def __reduce__(self) -> Any:
        return _unpickled, (type(self).__mro__[2], self.__dict__)


# --- models and their optimizers ------------------------------------------------------------------


def _is_sharded(model: nn.Module) -> bool:
    return isinstance(bare(model), FSDP)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that AcceleratedOptimizer wraps."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _pairs(accelerator: Any) -> list[tuple[nn.Module, torch.optim.Optimizer | None]]:
    """Return each sharded model with its optimizer, or None if it has no or several optimizers."""
    pairs = []
    for model in filter(_is_sharded, accelerator._models):
        params = {id(param) for param in model.parameters()}
        optimizers = [
            each
            for each in map(_inner, accelerator._optimizers)
            if all(id(p) in params for group in each.param_groups for p in group["params"])
        ]
        pairs.append((model, optimizers[0] if len(optimizers) == 1 else None))
    return pairs


def _folder(folder: str, index: int) -> Path:
    return Path(folder, f"{_FOLDER}_{index}" if index else _FOLDER)


def _load_weights(folder: Path, index: int, model: nn.Module) -> None:
    """Load what Accelerate saved of a plain model or of one in DDP."""
    ending = f"_{index}" if index else ""
    safe, pickled = folder / f"model{ending}.safetensors", folder / f"pytorch_model{ending}.bin"
    if safe.is_file():
        load(safe, model)
        return
    state = torch.load(pickled, map_location="cpu", weights_only=True)
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    bare(model).load_state_dict(state)
