"""transformers: `shard(Trainer)` returns a Trainer that shards; models generate and count
parameters.

    trainer = zshard.transformers.shard(Trainer)(model=model, args=arguments, ...)

A Trainer (or one of TRL's) reaches the model through its Accelerator, so zshard makes that shard
(integrations/accelerate.py). What remains are the calls for a state dict that a Trainer makes on
one rank only: where such a call needs all ranks, the others make it as well.

Transformers can make all ranks generate until the last has its tokens (`synced_gpus`), and does so
for models that torch has sharded. zshard needs that only where all ranks must take part in a
forward: over shm each rank generates by itself. zshard passes the argument instead of marking the
model, because the mark that transformers checks makes torch.compile treat the model as one of
torch's own.

Only shard() imports transformers; models are recognized by their methods.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from zshard.api import (
    EXTENSIONS,
    Extension,
    bare,
    full_named_parameters,
    is_unit,
    num_parameters,
    state_dict_form,
    state_of,
    units_of,
)
from zshard.integrations import accelerate

__all__ = ["shard"]

_T = TypeVar("_T")

_SYNCED = "synced_gpus"  # the argument of generate()
_COUNT = "num_parameters"
_COUNTS_FULL = "_zshard_counts_full"  # marks a method


def shard(trainer: type[_T], **arguments: object) -> type[_T]:
    """Return a subclass of a Trainer that shards its models, instead of wrapping DDP around them.

    It shards the model when training or an evaluation begins, and reference models (of DPO) when
    they are made. Its checkpoints have the files of a Trainer under DDP, with full tensors: each
    resumes the other's, on any number of ranks.

    Args:
        trainer: transformers.Trainer or a subclass of it, such as Seq2SeqTrainer, trl.SFTTrainer or
            your own.
        arguments: those of FSDP() for all models, such as strategy and auto_wrap_policy.

    Raises:
        TypeError: `trainer` is no class of a Trainer, or an argument is not one of FSDP().
        ValueError, on construction: TrainingArguments ask for fsdp or deepspeed,
            or WANDB_WATCH for full tensors of one rank.
    """
    call = "zshard.transformers.shard()"
    if not isinstance(trainer, type):
        kind = type(trainer).__name__
        raise TypeError(f"{call} expects a class, got an object: call shard({kind})(model=...)")
    if not hasattr(trainer, "create_accelerator_and_postprocess"):
        raise TypeError(f"{call} expects a subclass of transformers.Trainer, got {trainer}")
    if issubclass(trainer, _ShardingTrainer):
        raise TypeError(f"{trainer.__name__} already shards its models: call {call} once")
    accelerate.check_arguments(call, arguments)
    module: Any = importlib.import_module("transformers.trainer")
    if not hasattr(module.get_model_param_count, _COUNTS_FULL):  # which train() logs
        module.get_model_param_count = _counting(module.get_model_param_count)
    names = {"__module__": trainer.__module__, "_zshard_arguments": arguments}
    return type(trainer.__name__, (_ShardingTrainer, trainer), names)


def _follow_saving(model: Any) -> None:
    """Take part in PEFT's calls on the rank that saves adapters, in its order: it runs the encoder
    of prompts, and calls state_dict() on each module of `modules_to_save`."""
    for name, config in getattr(model, "peft_config", {}).items():
        if config.is_prompt_learning and not config.inference_mode:
            with torch.no_grad():
                model.get_prompt_embedding_to_save(name)
        for module in model.modules():
            saved = getattr(module, "modules_to_save", None)
            if isinstance(saved, torch.nn.ModuleDict) and name in saved:
                saved[name].state_dict()


_Trainer: Any = object  # the Trainer's class follows this one in the MRO


class _ShardingTrainer(_Trainer):  # type: ignore[misc]
    """Mixin that precedes a Trainer's own class."""

    _zshard_arguments: dict[str, Any]

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        watched = os.environ.get("WANDB_WATCH", "false").lower()
        if "wandb" in self.args.report_to and watched in ("all", "gradients", "parameters"):
            raise ValueError(f"WANDB_WATCH={watched} logs full tensors of one rank: unset it")
        accelerate.shard(self.accelerator, **self._zshard_arguments)
        self.accelerator._zshard_evaluates_wrapped = False

    def get_num_trainable_parameters(self) -> int:
        return num_parameters(bare(self.model), trainable_only=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.args.should_save and self._zshard_needs_all():
            self._zshard_state_dict()
            _follow_saving(bare(self.model))
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
        if state_dict is None and self.args.should_save:
            state_dict = self._zshard_state_dict()
        with torch.no_grad():  # one rank may run a forward here: that of PEFT's prompts
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.args.should_save and self._zshard_needs_all():
            self.optimizer.state_dict()
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, *args: object, **kwargs: object) -> None:
        self.accelerator.wait_for_everyone()  # one rank may still be saving what is overwritten now
        super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        self.accelerator.wait_for_everyone()
        super()._load_best_model()

    def evaluation_loop(self, *args: object, **kwargs: object) -> Any:
        for name, dtype in (("bf16_full_eval", "bf16"), ("fp16_full_eval", "fp16")):
            if getattr(self.args, name) and not self.is_in_train:
                raise ValueError(f"{name}=True would convert a sharded model: set {dtype}=True")
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, *args: object, **kwargs: object) -> Any:
        if self._zshard_needs_all() and hasattr(self, "_gen_kwargs"):  # without it, False is passed
            self._gen_kwargs.setdefault(_SYNCED, True)
        return super().prediction_step(*args, **kwargs)

    def _zshard_needs_all(self) -> bool:
        """Return whether all ranks must take part in reading the model's values: not over
        shm, where a rank reads the other shards."""
        model = bare(self.model)
        return is_unit(model) and _needs_all(model)

    def _zshard_state_dict(self) -> Any:
        """Return the state dict on the ranks that save; None if they need no other rank."""
        if not self._zshard_needs_all():
            return None
        model = bare(self.model)
        with state_dict_form(model, rank0_only=not self.args.save_on_each_node):
            return model.state_dict()


# --- models ---------------------------------------------------------------------------------------


class _PretrainedModels(Extension):
    def methods(self, original: type[nn.Module]) -> dict[str, Any]:
        return _generate_of(original)

    def finish(self, model: nn.Module, of: nn.Module | None = None) -> None:
        count_full_in(model, _COUNT)


EXTENSIONS.append(_PretrainedModels())


def count_full_in(model: nn.Module, name: str) -> None:
    """Make a method count full parameters, on the classes of a model's modules. Such methods add up
    the sizes of the parameters that named_parameters() yields; meanwhile it yields full shapes."""
    for cls in {type(part) for part in model.modules()}:
        owner = next((each for each in cls.__mro__ if name in vars(each)), None)
        method = None if owner is None else vars(owner)[name]
        if inspect.isfunction(method) and not hasattr(method, _COUNTS_FULL):
            setattr(owner, name, _counting(method))


def _counting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(self: nn.Module, *args: object, **kwargs: object) -> Any:
        if "named_parameters" in vars(self):
            return method(self, *args, **kwargs)
        vars(self)["named_parameters"] = functools.partial(full_named_parameters, self)
        try:
            return method(self, *args, **kwargs)
        finally:
            del vars(self)["named_parameters"]

    setattr(counted, _COUNTS_FULL, True)
    return counted


def _generate_of(original: type[nn.Module]) -> dict[str, Any]:
    """Return {"generate": the method for the FSDP class}, or {} if it needs none."""
    generate: Any = inspect.getattr_static(original, "generate", None)
    if not inspect.isfunction(generate):
        return {}
    signature = inspect.signature(generate)
    kinds = {each.kind for each in signature.parameters.values()}
    if _SYNCED not in signature.parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
        return {}

    @functools.wraps(generate)
    def synced(self: nn.Module, *args: object, **kwargs: object) -> Any:
        is_positional = _SYNCED in signature.bind_partial(self, *args).arguments
        is_passed = kwargs.get(_SYNCED) is not None or is_positional
        if not is_passed and _needs_all(self) and _takes(self, generate):
            kwargs[_SYNCED] = True
        return generate(self, *args, **kwargs)

    return {"generate": synced}


def _needs_all(module: nn.Module) -> bool:
    """Return whether all ranks of the job must take part in a forward of this unit's model."""
    state, comms = state_of(module), state_of(module).comms
    if comms.all.world == 1 or comms.all.world != dist.get_world_size():
        return False  # transformers synchronizes all ranks of the job
    gathers = comms.shard_group.world > 1 and comms.shard_group.transport != "shm"
    sharded = any(not each.unit.replicated for _, each in units_of(module))
    return state.sync_buffers is True or (sharded and (gathers or comms.replica_group is not None))


def _takes(module: nn.Module, method: Callable[..., Any]) -> bool:
    """Return whether `method`, or that of an inner module to which it passes keyword arguments, has
    the argument."""
    inner = (getattr(type(m), "generate", None) for m in module.modules() if m is not module)
    methods = [method, *filter(callable, inner)]
    return any(_SYNCED in inspect.signature(each).parameters for each in methods)
