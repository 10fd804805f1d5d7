"""DeepSpeed's engine over a sharded model: forward, backward, step, and the queries of scripts.

The engine only counts and calls. A round is gradient_accumulation_steps forwards, backwards and
steps. Only the last step() of a round clips, steps the optimizer, zeroes the gradients and steps
the scheduler. FSDP, GradScaler and the optimizer do the rest. Queries return values of the config
or counts of the engine, without communication.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from zshard.api import FSDP, GradScaler, ShardingStrategy, state_of
from zshard.integrations.deepspeed.ds_config import BatchSizes, Settings
from zshard.integrations.deepspeed.engine_checkpoints import EngineCheckpoints

_ACCUMULATES = (ShardingStrategy.NO_SHARD, ShardingStrategy.ZERO1)
"""Stages whose gradients stay full until a round's last backward, as in DeepSpeed: 0 and 1."""


class DeepSpeedEngine(EngineCheckpoints, nn.Module):
    """The engine that zshard.initialize() returns: a sharded model with DeepSpeed's methods.

    Call it as the model. Then call backward(loss) and step(), once each per micro-batch, on all
    ranks. Other attributes are the model's.

    module: the sharded model. optimizer, lr_scheduler, training_dataloader: those of initialize(),
    or None. config: the DeepSpeed config as a dict, with values for "auto". global_steps: rounds
    that ended. skipped_steps: those that were skipped because of an overflow. micro_steps: calls of
    step(). global_samples: train_batch_size() times global_steps.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, scheduler: Any, settings: Settings
    ) -> None:
        super().__init__()
        self.module = model
        self.optimizer, self.lr_scheduler = optimizer, scheduler
        self.training_dataloader: DataLoader[Any] | None = None
        self.config = settings.values
        self.global_steps = self.skipped_steps = self.micro_steps = self.global_samples = 0
        self.global_rank = dist.get_rank()
        self.world_size = self.dp_world_size = state_of(model).comms.all.world
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._settings, self._sizes = settings, settings.sizes
        self._backwards = self._forwards = self._micro = 0  # since the last step(); in this round
        is_managed = settings.values.get("managed_gradient_accumulation", True) is not False
        self._boundary: bool | None = None if is_managed else True
        self._in_no_sync = self._step_applied = False
        self._norm: float | None = None
        self._scaler: GradScaler | None = None
        self._new_scaler()
        if self._sizes.steps > 1 and settings.strategy in _ACCUMULATES:
            with self.no_sync():
                pass  # memory("predicted") counts the full gradients of rounds from now on

    # --- forward and backward ---------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward.

        Raises RuntimeError for a second micro-batch if the first had its backward but no step.
        """
        if torch.is_grad_enabled() and self.module.training:
            if self._backwards and self._boundary is None and self._sizes.steps > 1:
                raise RuntimeError(
                    "engine.step() was not called after engine.backward(): call both for each of "
                    f"the gradient_accumulation_steps={self._sizes.steps} micro-batches"
                )
            self._forwards += 1
        if self._settings.autocast is None:
            return self.module(*args, **kwargs)
        with torch.autocast(self.device.type, self._settings.autocast):
            return self.module(*args, **kwargs)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Compute the gradients of `loss`, a scalar, divided by the steps of a round.

        Returns the divided loss. scale_wrt_gas: False: do not divide. Collective. If it raises, the
        gradients of the round are dropped, and the next micro-batch is the first of a round.

        Raises TypeError if `loss` is not a scalar with a graph, RuntimeError without an optimizer.
        """
        self._need_optimizer("backward")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise TypeError(f"engine.backward() expects a scalar loss with a graph, got {kind}")
        if scale_wrt_gas and self._sizes.steps > 1:
            loss = loss / self._sizes.steps
        scaler: Any = self._scaler
        scaled = loss if scaler is None else scaler.scale(loss)
        unsynced = (
            self._settings.strategy in _ACCUMULATES
            and not self.is_gradient_accumulation_boundary()
            and not self._in_no_sync
        )
        try:
            with FSDP.no_sync(self.module) if unsynced else contextlib.nullcontext():
                scaled.backward(retain_graph=retain_graph)
        except BaseException:
            self._drop_round()
            raise
        self._backwards += 1
        return loss

    def _drop_round(self) -> None:
        """Begin a new round: unreduced gradients may contain part of a failed backward."""
        self.module.zero_grad()
        self._micro = self._backwards = self._forwards = 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward does not reduce gradients; the next one outside does.

        Unlike DeepSpeed's, it works with all stages. step() raises RuntimeError inside it.
        """
        if self._in_no_sync:
            raise RuntimeError("engine.no_sync() is not reentrant: leave the enclosing one first")
        self._in_no_sync = True
        try:
            with FSDP.no_sync(self.module):
                yield
        finally:
            self._in_no_sync = False

    # --- the step ---------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the last of its round."""
        if self._boundary is not None:
            return self._boundary
        return self._micro + 1 >= self._sizes.steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the current micro-batch is the last of its round, from now on; None: count
        again. Call it before the forward."""
        self._boundary = is_boundary

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch. At the end of a round: clip, step the optimizer, zero the gradients
        and step the scheduler. Collective.

        lr_kwargs: arguments for the scheduler's step().

        If the optimizer's step raises, the gradients of the round are dropped, and the next
        micro-batch is the first of a round.

        Raises RuntimeError if backward() was not called before, within no_sync(), or without an
        optimizer; OverflowError if the gradients overflow at the least loss scale.
        """
        self._need_optimizer("step")
        if self._in_no_sync:
            raise RuntimeError("engine.step() was called within engine.no_sync(): call it outside")
        if not self._backwards:
            raise RuntimeError(
                "engine.step() was called without engine.backward(loss): call it instead of "
                "loss.backward()"
            )
        ends = self.is_gradient_accumulation_boundary()
        self._step_applied = False
        try:
            if ends:
                self._end_round(lr_kwargs or {})
        finally:
            self._backwards = self._forwards = 0
        if not ends:
            self.micro_steps += 1
            self._micro += 1

    def _end_round(self, lr_kwargs: dict[str, Any]) -> None:
        try:
            overflow = self._update()
        except BaseException:
            self._drop_round()
            self._new_scaler()  # the old one has unscaled these gradients
            raise
        self.module.zero_grad()
        self.micro_steps += 1
        self._micro = 0
        self.global_steps += 1
        self.global_samples += self._sizes.train
        self.skipped_steps += overflow
        self._step_applied = not overflow
        scale = self._settings.loss_scale
        if scale is not None and self._scaler is not None:
            try:
                scale.update(overflow)
            finally:
                self._scaler.update(scale.scale)
                self._show_scale(overflow)
        if self.lr_scheduler is not None and not overflow:
            self.lr_scheduler.step(**lr_kwargs)
        every = self._settings.values.get("steps_per_print") or math.inf
        if self.global_steps % every == 0 and self.global_rank == 0:
            print(
                f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}, "
                f"mom={self.get_mom()}",
                file=sys.stderr,
            )

    def _update(self) -> bool:
        """Clip and step the optimizer; return whether it was skipped because of an overflow."""
        optimizer, settings = self.optimizer, self._settings
        assert optimizer is not None
        overflow = False
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)
            overflow = any(map(bool, self._scaler._found_inf_per_device(optimizer).values()))
        self._norm = None
        if settings.clipping or settings.computes_norm or settings.skips_overflows:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            self._norm = float(nn.utils.clip_grad_norm_(params, settings.clipping or math.inf))
            if settings.skips_overflows:
                overflow = not math.isfinite(self._norm)
        if self._scaler is not None:
            self._scaler.step(optimizer)
        elif not overflow:
            optimizer.step()
        return overflow

    def _new_scaler(self) -> None:
        """Scale losses by the loss scale of the current settings."""
        scale = self._settings.loss_scale
        if scale is not None:
            self._scaler = GradScaler(self.device.type, scale.scale)
            self._show_scale(False)

    def _show_scale(self, overflow: bool) -> None:
        """Publish the loss scale on the optimizer, where scripts read it."""
        if self.optimizer is not None and self._settings.loss_scale is not None:
            scale = self._settings.loss_scale.scale
            vars(self.optimizer).update(cur_scale=scale, loss_scale=scale, overflow=overflow)

    def _need_optimizer(self, name: str) -> None:
        if self.optimizer is None:
            raise RuntimeError(
                f"engine.{name}() needs an optimizer: add 'optimizer' to the DeepSpeed config"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none)

    # --- queries ----------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Return the samples of an optimizer step, over all ranks."""
        return self._sizes.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a forward on one rank."""
        return self._sizes.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the number of backwards per optimizer step."""
        return self._sizes.steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the batch size by other gradient_accumulation_steps. Call it on all ranks.

        Raises ValueError if it is not a multiple of the micro-batches of all ranks, RuntimeError in
        the middle of a round.
        """
        if self._micro:
            raise RuntimeError(
                f"engine.set_train_batch_size() was called after {self._micro} of "
                f"{self._sizes.steps} micro-batches of a step: call it between optimizer steps"
            )
        least = self._sizes.micro * self.dp_world_size
        if train_batch_size < least or train_batch_size % least:
            raise ValueError(
                f"train_batch_size={train_batch_size} is not a multiple of {least}, one micro-batch"
                " per rank: choose a multiple"
            )
        steps = train_batch_size // least
        self._sizes = BatchSizes(train_batch_size, self._sizes.micro, steps)

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
        return [group.get("lr", 0.0) for group in self._param_groups]

    def get_mom(self) -> list[Any]:
        """Return the betas of the param groups, or the momentum of SGD and RMSprop."""
        has_betas = any("betas" in group for group in self._param_groups)
        name = "betas" if has_betas else "momentum"
        return [group.get(name, 0.0) for group in self._param_groups]

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    @property
    def cur_scale(self) -> float:
        """The current loss scale; 1 without fp16."""
        scale = self._settings.loss_scale
        return 1.0 if scale is None else scale.scale

    def loss_scale(self) -> float:
        """Return "loss_scale" of the config: 0 for a dynamic scale. See cur_scale for the current
        one."""
        scale = self._settings.loss_scale
        return 0.0 if scale is None or scale.is_dynamic else scale.scale

    @property
    def device(self) -> torch.device:
        """The device that this rank trains on."""
        device: torch.device = next(self.module.parameters()).device
        return device

    def zero_optimization_stage(self) -> int:
        return self._settings.stage

    def fp16_enabled(self) -> bool:
        return self._settings.dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        return self._settings.dtype is torch.bfloat16

    def gradient_clipping(self) -> float:
        """Return the largest norm of the gradients; 0: they are not clipped."""
        return self._settings.clipping

    def train(self, mode: bool = True) -> Any:
        self.module.train(mode)
        return self

    def compile(self, *args: object, **kwargs: object) -> None:
        """Compile the model in place with torch.compile() and its arguments, but not the engine,
        which counts in its forward."""
        self.module.compile(*args, **kwargs)

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        data_sampler: Sampler[Any] | Iterable[Any] | None = None,
        num_local_io_workers: int = 0,
    ) -> DataLoader[Any]:
        """Return a DataLoader of micro-batches, in which each rank gets its own part of the data.

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
            drop_last=bool(self._settings.values.get("dataloader_drop_last", False)),
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("module")
            if model is None or not hasattr(model, name):
                raise AttributeError(
                    f"the engine and its model have no attribute '{name}': see docs/deepspeed.md"
                ) from None
        return getattr(model, name)


def check_dataset(dataset: object) -> None:
    """Raise TypeError if a DataLoader cannot take it."""
    has_length = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not has_length and not isinstance(dataset, IterableDataset):
        raise TypeError(f"training_data must be a torch Dataset, got {type(dataset).__name__}")
