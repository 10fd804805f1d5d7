"""The strategy for Lightning's Trainer.

Lightning's DDP strategy, which starts and connects ranks, with a sharded module in place of a
wrapped one. It calls steps as the module's forward, so that they see full parameters.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from zshard.api import FSDP, broadcast_buffers, call_as_forward, class_of, full_numel, is_unit, load
from zshard.integrations.lightning.fabric import (
    Sharding,
    on_rank_0,
    optimizer_on_rank_0,
    trainer_package,
)


class ZShardStrategy(Sharding, trainer_package.strategies.DDPStrategy):  # type: ignore[misc]
    """Lightning's Trainer with a LightningModule that zshard shards.

    ::

        import zshard.lightning
        trainer = Trainer(accelerator="cpu", devices=2, strategy="zshard")
        trainer = Trainer(..., strategy=zshard.lightning.ZShardStrategy(sharding_strategy="zero2"))

    The module is sharded in setup(), in place, before configure_optimizers(), and stays sharded
    after fit(). Losses are those of strategy="ddp".

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin,
        process_group_backend, timeout, start_method: those of Lightning's DDPStrategy. `timeout` is
            that of the process group, which zshard's waits take over.
        state_dict_type: "full" (the default): a checkpoint is one file, the same as under DDP.
            "sharded": it is a folder of zshard.save(), written by all ranks at once. Either one
            resumes under any number of ranks and any zshard strategy; so does a DDP checkpoint.
        activation_checkpointing_policy: module classes whose activations are recomputed in
            backward, or a policy of torch.distributed.fsdp.wrap. Default: None.
        device_mesh: a DeviceMesh, or a tuple (replicas, ranks of a replica) for a hybrid strategy.
        **fsdp: arguments of zshard.FSDP: sharding_strategy, auto_wrap_policy, mixed_precision,
            cpu_offload, offload, memory_limit, ... Without mixed_precision, the Trainer's
            `precision` works as under DDP.

    Raises:
        TypeError: an argument that neither knows.
        ValueError: `state_dict_type` is something else; and in setup(), for a module that was
            sharded over other ranks, several optimizers with "sharded", or what FSDP refuses.
    """

    strategy_name = "zshard"
    model: Any  # the model to train: the LightningModule itself

    _restores_late: bool | None = None

    def _configure_launcher(self) -> None:
        """Fork the ranks in a notebook, as Lightning's "ddp_notebook" does."""
        connector = trainer_package.trainer.connectors.accelerator_connector
        is_notebook = bool(getattr(connector, "_IS_INTERACTIVE", False))
        if is_notebook and self.__dict__["_start_method"] == "popen":
            self.__dict__.update(_start_method="fork")
        super()._configure_launcher()

    # --- a run ----------------------------------------------------------------------------------

    def connect(self, model: nn.Module) -> None:
        super().connect(model)
        self._restores_late = None

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        is_fitting = trainer.state.fn == "fit"
        if not is_unit(self.lightning_module):  # an earlier run has already sharded it
            if is_fitting and self._layer_sync:
                self.model = self._layer_sync.apply(self.model)
            self.model = self.precision_plugin.convert_module(self.model)
        self.model = self._setup_model(self.model)
        if is_fitting:
            self._share_averages(trainer)
            self.setup_optimizers(trainer)
            if self._is_sharded_save and len(self.optimizers) > 1:
                count = len(self.optimizers)
                raise ValueError(f"{count} optimizers are configured: use state_dict_type='full'")
        self.setup_precision_plugin()

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if not is_unit(model):
            self._shard(model, self.world_size, not self.lightning_module.automatic_optimization)
        return model

    def _share_averages(self, trainer: Any) -> None:
        """Shard the copies of the module that weight-averaging callbacks have made."""
        for callback in trainer.callbacks:
            average: Any = getattr(callback, "_average_model", None)
            if not isinstance(average, nn.Module):
                continue
            if self._is_sharded_save:
                name = type(callback).__name__
                raise ValueError(f"{name} saves full weights: use state_dict_type='full'")
            if hasattr(average, "n_averaged"):  # torch's AveragedModel, around the copy
                average = average.module
            self._setup_model(average)

    def model_to_device(self) -> None:
        """Do nothing: FSDP moves one unit at a time."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        device = torch.device("meta") if empty_init else nullcontext()
        with device, self.precision_plugin.tensor_init_context():
            yield

    def teardown(self) -> None:
        # DDPStrategy's own would move the module and its optimizers' state to the CPU.
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # --- steps ----------------------------------------------------------------------------------

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.lightning_module
        return call_as_forward(module, getattr(module, name), args, kwargs)

    def training_step(self, *args: object, **kwargs: object) -> Any:
        if not self.lightning_module.automatic_optimization:  # the step runs entire backwards
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return self._call("training_step", args, kwargs)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Broadcast buffers: a validation under DDP would start with that broadcast, but here one
        rank may evaluate alone."""
        super().post_backward(closure_loss)
        broadcast_buffers(self.lightning_module)

    def validation_step(self, *args: object, **kwargs: object) -> Any:
        with self.precision_plugin.val_step_context():
            return self._call("validation_step", args, kwargs)

    def test_step(self, *args: object, **kwargs: object) -> Any:
        with self.precision_plugin.test_step_context():
            return self._call("test_step", args, kwargs)

    def predict_step(self, *args: object, **kwargs: object) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._call("predict_step", args, kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with FSDP.no_sync(self.model):
            yield

    # --- checkpoints ----------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True if a checkpoint is loaded into the sharded module. DDP loads it before setup(),
        which does not work for a module on the meta device."""
        if self._restores_late is None:  # setup() runs between two queries
            module = self.lightning_module
            on_meta = any(param.is_meta for param in module.parameters())
            self._restores_late = on_meta or is_unit(module)
        return self._restores_late

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {} if self._is_sharded_save else on_rank_0(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {} if self._is_sharded_save else optimizer_on_rank_0(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: object, storage_options: object = None
    ) -> None:
        if not self._is_sharded_save:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError("storage_options and filter need state_dict_type='full'")
        if checkpoint.pop("state_dict"):
            raise RuntimeError(
                "on_save_checkpoint() changed checkpoint['state_dict']: use state_dict_type='full'"
            )
        has_optimizer = bool(checkpoint.pop("optimizer_states", None))
        optimizer = self.optimizers[0] if has_optimizer else None
        self._save_folder(filepath, self.lightning_module, optimizer, checkpoint)

    def load_checkpoint(self, checkpoint_path: object, weights_only: bool | None = None) -> Any:
        path = self.broadcast(checkpoint_path)
        self._folder = path if os.path.isdir(path) else None
        if self._folder is None:
            return super().load_checkpoint(path, weights_only)
        module = self.lightning_module
        rest = self._load_folder(path, module, None, module.strict_loading, weights_only)
        return {**rest, "state_dict": {}, "optimizer_states": []}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._folder is None:  # otherwise load_checkpoint() has loaded it
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._folder is None:
            super().load_optimizer_state_dict(checkpoint)
        elif self.optimizers:
            module = self.lightning_module
            load(self._folder, module, self.optimizers[0], strict=module.strict_loading)


# --- Lightning's table of a model -----------------------------------------------------------------


def _count_full_parameters() -> None:
    """Make Lightning's tables, and its summarize(), count full parameters and name the user's
    classes. Idempotent."""
    name = f"{trainer_package.__name__}.utilities.model_summary.model_summary"
    tables: Any = importlib.import_module(name)
    layer, table = tables.LayerSummary, tables.ModelSummary
    layer.num_parameters = property(lambda self: _count(self._module.parameters()))
    layer.layer_type = property(lambda self: class_of(self._module).__name__)
    table.total_parameters = property(lambda self: _count(self._model.parameters()))
    table.trainable_parameters = property(
        lambda self: _count(p for p in self._model.parameters() if p.requires_grad)
    )


def _count(params: Iterable[nn.Parameter]) -> int:
    return sum(full_numel(p) for p in params if not isinstance(p, UninitializedParameter))


_count_full_parameters()
