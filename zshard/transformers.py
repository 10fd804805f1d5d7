"""The Trainer of transformers, and those of TRL: `shard(Trainer)` is a Trainer that shards.

    trainer = zshard.transformers.shard(Trainer)(model=model, args=arguments, ...)

A Trainer reaches the model through its Accelerator, so that one is made to shard
(zshard/accelerate.py). What remains are the calls that a Trainer makes on one rank only, for a
state dict: where that takes all ranks, the others make them as well.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from zshard import accelerate
from zshard.model.generate import ARGUMENT, needs_all
from zshard.model.whole_counts import num_parameters
from zshard.state import state_dict_form
from zshard.units.names import bare
from zshard.units.units import is_unit

__all__ = ["shard"]

_T = TypeVar("_T")


def shard(trainer: type[_T], **arguments: Any) -> type[_T]:
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
        raise TypeError(
            f"{call} expects a class, such as Trainer, got an object of class {kind}: shard the "
            f"class, then construct it: shard({kind})(model=..., args=...)"
        )
    if not hasattr(trainer, "create_accelerator_and_postprocess"):
        raise TypeError(f"{call} expects a subclass of transformers.Trainer, got {trainer}")
    if issubclass(trainer, _ShardingTrainer):
        raise TypeError(f"{trainer.__name__} already shards its models: call {call} once")
    accelerate.check_arguments(call, arguments)
    _count_full_parameters()
    names = {"__module__": trainer.__module__, "_zshard_arguments": arguments}
    return type(trainer.__name__, (_ShardingTrainer, trainer), names)


def _count_full_parameters() -> None:
    """Has train() log the number of full parameters: it counts what model.parameters() yields."""
    module: Any = importlib.import_module("transformers.trainer")
    count = module.get_model_param_count
    if hasattr(count, "_zshard_counts"):
        return

    @functools.wraps(count)
    def counted(model: Any, trainable_only: bool = False) -> int:
        model = bare(model)
        if not is_unit(model):
            return int(count(model, trainable_only))
        return num_parameters(model, trainable_only)

    vars(counted)["_zshard_counts"] = True
    module.get_model_param_count = counted


def _follow_saving(model: Any) -> None:
    """Take part in what PEFT does on the rank that saves adapters, in its order: it runs the
    encoder of prompts, and asks each module of `modules_to_save` for its state dict."""
    for name, config in getattr(model, "peft_config", {}).items():
        if config.is_prompt_learning and not config.inference_mode:
            with torch.no_grad():
                model.get_prompt_embedding_to_save(name)
        for module in model.modules():
            saved = getattr(module, "modules_to_save", None)
            if isinstance(saved, torch.nn.ModuleDict) and name in saved:
                saved[name].state_dict()


if TYPE_CHECKING:
    _Trainer = Any
else:  # the class of the Trainer comes after this one
    _Trainer = object


class _ShardingTrainer(_Trainer):  # type: ignore[misc]
    """What comes before the class of a Trainer."""

    _zshard_arguments: dict[str, Any]

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        watched = os.environ.get("WANDB_WATCH", "false").lower()
        if "wandb" in self.args.report_to and watched in ("all", "gradients", "parameters"):
            raise ValueError(
                f"WANDB_WATCH={watched} logs full tensors of one rank, which has shards: unset it, "
                "and log zshard.whole_named_parameters(model) in a callback of all ranks"
            )
        accelerate.shard(self.accelerator, **self._zshard_arguments)
        self.accelerator._zshard_evaluates_wrapped = False

    def get_num_trainable_parameters(self) -> int:
        model = bare(self.model)
        if not is_unit(model):
            return int(super().get_num_trainable_parameters())
        return num_parameters(model, trainable_only=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.args.should_save and self._zshard_needs_all():
            self._zshard_state_dict()
            _follow_saving(bare(self.model))
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None and self.args.should_save:
            state_dict = self._zshard_state_dict()
        with torch.no_grad():  # one rank may run a forward then: that of PEFT's prompts
            super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.args.should_save and self._zshard_needs_all():
            self.optimizer.state_dict()
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.accelerator.wait_for_everyone()  # one rank may still save what is overwritten now
        super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        self.accelerator.wait_for_everyone()
        super()._load_best_model()

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._zshard_needs_all() and hasattr(self, "_gen_kwargs"):  # else passed as False
            self._gen_kwargs.setdefault(ARGUMENT, True)
        return super().prediction_step(*args, **kwargs)

    def _zshard_needs_all(self) -> bool:
        """Whether values of the model take all ranks: not over shm, where a rank reads the rest."""
        model = bare(self.model)
        return is_unit(model) and needs_all(model)

    def _zshard_state_dict(self) -> Any:
        """The state dict, in memory of the ranks that save; None if they need no other rank."""
        if not self._zshard_needs_all():
            return None
        model = bare(self.model)
        rank0_only = not self.args.save_on_each_node
        with state_dict_form(model, rank0_only=rank0_only):
            return model.state_dict()
