"""What scripts ask DeepSpeed's engine: sizes, rates, norms, dtypes, and what they set there.

Each answer is a value of the config or a count of the engine; nothing communicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from zshard.deepspeed.batch_sizes import BatchSizes
from zshard.deepspeed.ds_config import Settings


class EngineFacts:
    """The part of the engine that answers."""

    module: Any
    optimizer: Optimizer | None
    global_rank: int
    dp_world_size: int
    _settings: Settings
    _sizes: BatchSizes
    _micro: int
    _norm: float | None
    _step_applied: bool

    # --- batch sizes ------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Return the samples of an optimizer step, over all ranks."""
        return self._sizes.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a forward on one rank."""
        return self._sizes.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the number of backwards per optimizer step."""
        return self._sizes.steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the three of them, in this order."""
        return self._sizes.train, self._sizes.micro, self._sizes.steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the batch size by other gradient_accumulation_steps. Call it on all ranks.

        Raises ValueError if it is not a multiple of the micro-batches of all ranks, RuntimeError in
        the middle of a round.
        """
        self._check_between_rounds("set_train_batch_size")
        least = self._sizes.micro * self.dp_world_size
        if train_batch_size < least or train_batch_size % least:
            raise ValueError(
                f"train_batch_size={train_batch_size} is not a multiple of {least}: "
                f"train_micro_batch_size_per_gpu={self._sizes.micro} * {self.dp_world_size} rank(s)"
            )
        steps = train_batch_size // least
        self._sizes = BatchSizes(train_batch_size, self._sizes.micro, steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of a forward; gradient_accumulation_steps stay."""
        self._check_between_rounds("set_train_micro_batch_size")
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, got {micro_batch_size}")
        train = micro_batch_size * self._sizes.steps * self.dp_world_size
        self._sizes = BatchSizes(train, micro_batch_size, self._sizes.steps)

    def _check_between_rounds(self, name: str) -> None:
        if self._micro:
            raise RuntimeError(
                f"engine.{name}() was called after {self._micro} of {self._sizes.steps} "
                "micro-batches of a step: call it where is_gradient_accumulation_boundary() was "
                "last True"
            )

    # --- the step ---------------------------------------------------------------------------------

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the gradients of the last step, over all ranks, before clipping.

        None before the first step, and where nothing needs it: at stage 0 without clipping, and
        with "compute_grad_norm": false.
        """
        return self._norm

    def was_step_applied(self) -> bool:
        """Return whether the last step() changed the parameters."""
        return self._step_applied

    def get_lr(self) -> list[Any]:
        """Return the learning rates of the param groups."""
        return self._group_values("lr")

    def get_mom(self) -> list[Any]:
        """Return the betas of the param groups, or the momentum of SGD and RMSprop."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return self._group_values(
            "betas" if any("betas" in each for each in groups) else "momentum"
        )

    def _group_values(self, name: str) -> list[Any]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get(name, 0.0) for group in groups]

    @property
    def cur_scale(self) -> float:
        """The current loss scale; 1 without fp16."""
        scale = self._settings.loss_scale
        return 1.0 if scale is None else scale.scale

    def loss_scale(self) -> float:
        """Return "loss_scale" of the config: 0 for a dynamic one. cur_scale is the current one."""
        scale = self._settings.loss_scale
        return 0.0 if scale is None or scale.is_dynamic else scale.scale

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale is dynamic."""
        scale = self._settings.loss_scale
        return scale is not None and scale.is_dynamic

    # --- the config -------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device that this rank trains on."""
        device: torch.device = next(self.module.parameters()).device
        return device

    def zero_optimization(self) -> bool:
        """Return whether the stage is 1 or more."""
        return self._settings.stage > 0

    def zero_optimization_stage(self) -> int:
        """Return the stage of ZeRO."""
        return self._settings.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether the stage is 2 or 3."""
        return self._settings.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether the stage is 3."""
        return self._settings.stage >= 3

    def fp16_enabled(self) -> bool:
        """Return whether "fp16" is enabled."""
        return self._settings.dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Return whether "bf16" is enabled."""
        return self._settings.dtype is torch.bfloat16

    def optimizer_name(self) -> str | None:
        """Return the optimizer's type in the config, or the class of the one that was passed."""
        section = self._settings.section("optimizer")
        if section is not None:
            return str(section["type"])
        return None if self.optimizer is None else type(self.optimizer).__name__

    def optimizer_params(self) -> dict[str, Any] | None:
        """Return "params" of the optimizer in the config; None if it has none."""
        return (self._settings.section("optimizer") or {}).get("params")

    def scheduler_name(self) -> str | None:
        """Return the scheduler's type in the config; None if it has none."""
        return (self._settings.section("scheduler") or {}).get("type")

    def scheduler_params(self) -> dict[str, Any] | None:
        """Return "params" of the scheduler in the config; None if it has none."""
        return (self._settings.section("scheduler") or {}).get("params")

    def torch_autocast_enabled(self) -> bool:
        """Return whether "torch_autocast" is enabled."""
        return self._settings.autocast is not None

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Return the dtype of torch.autocast around the forward; None: there is none."""
        return self._settings.autocast

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of forward and backward, and of the sums of gradients: float32."""
        return self._settings.dtype or torch.float32, torch.float32

    def gradient_clipping(self) -> float:
        """Return the largest norm of the gradients; 0: they are not clipped."""
        return self._settings.clipping

    def steps_per_print(self) -> int | None:
        """Return after how many steps rank 0 prints a line; None: never."""
        every = self._settings.values.get("steps_per_print")
        return None if every is None or math.isinf(every) else int(every)

    def dataloader_drop_last(self) -> bool:
        """Return whether data loaders drop a last, smaller batch."""
        return bool(self._settings.values.get("dataloader_drop_last", False))

    def wall_clock_breakdown(self) -> bool:
        """Return False: the engine has no timers."""
        return False

    def get_data_parallel_rank(self) -> int:
        """Return this rank."""
        return self.global_rank

    def _is_managed(self) -> bool:
        return self._settings.values.get("managed_gradient_accumulation", True) is not False

    # --- the model --------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Any:
        """Set the model to training, or with False to evaluation."""
        self.module.train(mode)
        return self

    def eval(self) -> Any:
        """Set the model to evaluation."""
        return self.train(False)

    def module_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state dict of full tensors. Collective over c10d."""
        return self.module.state_dict(*args, **kwargs)

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        data_sampler: Any = None,
        num_local_io_workers: int = 0,
    ) -> DataLoader[Any]:
        """Return a DataLoader of micro-batches, in which each rank has its own part of the data.

        batch_size: samples per batch; None: train_micro_batch_size_per_gpu(). The sampler of a
        dataset with a length shuffles: call loader.sampler.set_epoch(epoch) in each epoch.
        """
        check_dataset(dataset)
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(dataset, self.dp_world_size, self.global_rank)
        return DataLoader(
            dataset,
            batch_size or self._sizes.micro,
            sampler=data_sampler,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers,
            pin_memory=self.device.type == "cuda",
            drop_last=self.dataloader_drop_last(),
        )

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        """Return whether a dataset has indices and a length."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        """Return whether a dataset is an IterableDataset."""
        return isinstance(obj, IterableDataset)


def check_dataset(dataset: Any) -> None:
    """Raise TypeError if a DataLoader cannot take it."""
    has_length = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not has_length and not isinstance(dataset, IterableDataset):
        kind = type(dataset).__name__
        raise TypeError(f"training_data must be a torch Dataset, got {kind}")
