"""Train with zshard under Lightning: `Trainer(strategy="zshard")` and `Fabric(strategy="zshard")`.

The one idea: Lightning's own DDP strategy, with a sharded module in place of the wrapped one. FSDP
shards a module in place, so what Lightning calls the model and what the user wrote stay the same
object, and its loops, callbacks and precision plugins work as under DDP.

Importing this module registers the name "zshard". It needs Lightning: the package `lightning`, or
`pytorch_lightning` and `lightning_fabric` if the script has imported these. See docs/trainers.md.
"""

from __future__ import annotations

import importlib
import inspect
import io
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zshard._checkpoint.load import load
from zshard._checkpoint.save import save
from zshard._guard.whole_values import full_numel
from zshard._model.forward_methods import call_as_forward
from zshard._state_dict.optimizer import gather
from zshard._units.units import is_unit, units_of
from zshard.api import FSDP

__all__ = ["ZShardFabricStrategy", "ZShardStrategy"]

_PACKAGES = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))
_FSDP_ARGUMENTS = {*inspect.signature(FSDP.__new__).parameters} - {"cls", "module", "timeout"}
_CHUNK = 8 << 20  # bytes; one value of a checkpoint's `extra` may have twice as many


def _imported() -> tuple[Any, Any]:
    """Return Lightning's packages for the Trainer and for Fabric: those that the script uses."""
    used = [pair for pair in _PACKAGES if any(name in sys.modules for name in pair)]
    for trainer, fabric in (*used, *_PACKAGES):
        try:
            return importlib.import_module(trainer), importlib.import_module(fabric)
        except ModuleNotFoundError as error:
            if error.name not in {trainer, fabric, trainer.partition(".")[0]}:
                raise
    raise ImportError("zshard.lightning needs Lightning: pip install 'zshard[trainers]'")


_trainer, _fabric = _imported()


class _Sharding:
    """What both strategies do: shard modules, and save and load what is sharded."""

    root_device: torch.device
    broadcast: Callable[[Any], Any]
    barrier: Callable[[], None]

    def _configure(
        self, state_dict_type: str, device_mesh: Any, recomputed: Any, fsdp: dict[str, Any]
    ) -> None:
        if state_dict_type not in ("full", "sharded"):
            raise ValueError(
                f"state_dict_type must be 'full' or 'sharded', got {state_dict_type!r}"
            )
        for name in fsdp:
            if name not in _FSDP_ARGUMENTS:
                raise TypeError(
                    f"{type(self).__name__} has no argument {name!r}: it takes those of Lightning's "
                    "FSDPStrategy and of zshard.FSDP (DDP's find_unused_parameters is not needed)"
                )
        self._is_sharded_save = state_dict_type == "sharded"
        self._mesh = device_mesh
        self._recomputed = recomputed
        self._fsdp = fsdp

    def _shard(self, module: nn.Module, world: int, parts_too: bool = False) -> None:
        """Shard a module over all ranks; with `parts_too`, its children can be called alone."""
        for each, state in units_of(module):
            if state.comms.all.world != world:
                raise ValueError(
                    f"{type(each).__name__} is sharded over {state.comms.all.world} rank(s), but "
                    f"Lightning runs {world}: call zshard.FSDP in configure_model() (in Fabric: "
                    "after fabric.launch()), or leave it to the strategy"
                )
        if self._recomputed is not None:
            _recompute(module, self._recomputed)
        given = dict(self._fsdp)
        if isinstance(self._mesh, tuple):
            mesh = torch.distributed.device_mesh.init_device_mesh
            self._mesh = mesh(self.root_device.type, self._mesh)
        if self._mesh is not None:
            given["device_mesh"] = self._mesh
        if self.root_device.type != "cpu":
            given.setdefault("device_id", self.root_device)
        for part in _callable_parts(module) if parts_too else ():
            FSDP(part, **given)
        FSDP(module, **given)

    def _save_folder(
        self, path: Any, module: nn.Module, optimizer: Optimizer | None, rest: dict[str, Any]
    ) -> None:
        """Save a folder of zshard.save(), with rank 0's `rest` in it."""
        path = os.fspath(self.broadcast(path))
        chunks: list[bytes] = []
        if torch.distributed.get_rank() == 0:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            if os.path.isfile(path):
                os.unlink(path)
            data = io.BytesIO()
            torch.save(rest, data)
            raw = data.getvalue()
            chunks = [raw[i : i + _CHUNK] for i in range(0, len(raw), _CHUNK)]
        self.barrier()
        save(path, module, optimizer, extra={"lightning": chunks}, overwrite=True)

    def _load_folder(
        self, path: Any, module: nn.Module, optimizer: Optimizer | None, strict: bool, safe: Any
    ) -> dict[str, Any]:
        """Load what _save_folder() saved; return its `rest`."""
        loaded = load(path, module, optimizer, strict=strict)
        chunks = self.broadcast(loaded.get("lightning"))
        if not chunks:
            raise ValueError(
                f"{os.fspath(path)!r} was not saved by Lightning: load it with "
                "zshard.load(path, model)"
            )
        rest: dict[str, Any] = torch.load(io.BytesIO(b"".join(chunks)), weights_only=safe)
        return rest


class ZShardStrategy(_Sharding, _trainer.strategies.DDPStrategy):  # type: ignore[misc]
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

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = torch.distributed.constants.default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        *,
        state_dict_type: Literal["full", "sharded"] = "full",
        activation_checkpointing_policy: Collection[type[nn.Module]] | Any = None,
        device_mesh: Any = None,
        **fsdp: Any,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._configure(state_dict_type, device_mesh, activation_checkpointing_policy, fsdp)
        self._restores_late: bool | None = None

    # --- a run ----------------------------------------------------------------------------------

    def connect(self, model: nn.Module) -> None:
        super().connect(model)
        self._restores_late = None

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        is_fitting = trainer.state.fn == "fit"
        if not is_unit(self.lightning_module):  # it is after an earlier run
            if is_fitting and self._layer_sync:
                self.model = self._layer_sync.apply(self.model)
            self.model = self.precision_plugin.convert_module(self.model)
        self.model = self._setup_model(self.model)
        if is_fitting:
            self._share_averages(trainer)
            self.setup_optimizers(trainer)
            self._check_optimizers()
        self.setup_precision_plugin()
        for callback in trainer.callbacks:
            if isinstance(callback, _trainer.callbacks.ModelSummary):
                callback._summary = _summary_of(callback)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if not is_unit(model):
            self._shard(model, self.world_size, not self.lightning_module.automatic_optimization)
        return model

    def _share_averages(self, trainer: Any) -> None:
        """Shard the copies that callbacks for averages of the weights have made of the module."""
        for callback in trainer.callbacks:
            average = getattr(callback, "_average_model", None)
            if not isinstance(average, nn.Module):
                continue
            if self._is_sharded_save:
                raise ValueError(
                    f"{type(callback).__name__} saves full weights, which state_dict_type='sharded' "
                    "does not: use state_dict_type='full'"
                )
            average = average.module if hasattr(average, "n_averaged") else average
            if is_unit(average):
                continue
            was_meta = any(param.is_meta for param in average.parameters())
            average = self._setup_model(average)
            with torch.no_grad():
                for mine, given in zip(average.parameters(), self.model.parameters(), strict=True):
                    if was_meta:
                        mine.copy_(given)

    def _check_optimizers(self) -> None:
        if self._is_sharded_save and len(self.optimizers) > 1:
            raise ValueError(
                f"state_dict_type='sharded' saves one optimizer, but {len(self.optimizers)} are "
                "configured: use state_dict_type='full'"
            )

    def model_to_device(self) -> None:
        """Do nothing: FSDP moves one unit at a time."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        device = torch.device("meta") if empty_init else nullcontext()
        with device, self.precision_plugin.tensor_init_context():
            yield

    def teardown(self) -> None:
        # Not DDPStrategy's, which moves the module and its optimizers' state to the CPU.
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # --- steps ----------------------------------------------------------------------------------

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a step of the module with full parameters, as in its forward."""
        module = self.lightning_module
        return call_as_forward(module, getattr(module, name), args, kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.lightning_module.automatic_optimization:  # the step runs whole backwards
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return self._call("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._call("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._call("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._call("predict_step", args, kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.model.no_sync():
            yield

    # --- checkpoints ----------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is loaded into the sharded module; under DDP it is loaded before
        setup(), which a module on the meta device does not allow."""
        if self._restores_late is None:  # setup() lies between two questions
            module = self.lightning_module
            on_meta = any(param.is_meta for param in module.parameters())
            self._restores_late = on_meta or is_unit(module)
        return self._restores_late

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {} if self._is_sharded_save else _on_rank_0(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {} if self._is_sharded_save else _optimizer_on_rank_0(optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if not self._is_sharded_save:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError("storage_options cannot be used with state_dict_type='sharded'")
        if checkpoint.pop("state_dict"):
            raise RuntimeError(
                "on_save_checkpoint() changed checkpoint['state_dict'], which is empty with "
                "state_dict_type='sharded': use state_dict_type='full'"
            )
        has_optimizer = bool(checkpoint.pop("optimizer_states", None))
        optimizer = self.optimizers[0] if has_optimizer else None
        self._save_folder(filepath, self.lightning_module, optimizer, checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        path = self.broadcast(checkpoint_path)
        self._folder = path if os.path.isdir(path) else None
        if self._folder is None:
            full: dict[str, Any] = super().load_checkpoint(path, weights_only)
            return full
        module = self.lightning_module
        rest = self._load_folder(path, module, None, module.strict_loading, weights_only)
        return {**rest, "state_dict": {}, "optimizer_states": []}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._folder is None:  # else load_checkpoint() has loaded it
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._folder is None:
            super().load_optimizer_state_dict(checkpoint)
        elif self.optimizers:
            load(self._folder, self.lightning_module, self.optimizers[0])


class ZShardFabricStrategy(_Sharding, _fabric.strategies.DDPStrategy):  # type: ignore[misc]
    """Lightning's Fabric with modules that zshard shards.

    ::

        import zshard.lightning
        fabric = Fabric(accelerator="cpu", devices=2, strategy="zshard")

    fabric.setup() shards the module in place. Clipping, no_backward_sync() and mark_forward_method()
    work as under DDP.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision,
        process_group_backend, timeout, start_method: those of Fabric's DDPStrategy.
        state_dict_type: "full" (the default): fabric.save() writes one file, the same as under DDP.
            "sharded": it writes a folder of zshard.save(), of one module and at most one optimizer.
        activation_checkpointing_policy, device_mesh, **fsdp: see ZShardStrategy.

    Raises TypeError and ValueError as ZShardStrategy does.
    """

    strategy_name = "zshard"

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = torch.distributed.constants.default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        *,
        state_dict_type: Literal["full", "sharded"] = "full",
        activation_checkpointing_policy: Collection[type[nn.Module]] | Any = None,
        device_mesh: Any = None,
        **fsdp: Any,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._configure(state_dict_type, device_mesh, activation_checkpointing_policy, fsdp)
        self._backward_sync_control = _BackwardSync()
        self._is_saving = False

    def setup_module(self, module: nn.Module) -> nn.Module:
        if not is_unit(module):
            self._shard(module, self.world_size)
        return _Wrapper(module)

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module that is not to be sharded; FSDP moves others, one unit at a time."""
        if not any(param.is_meta for param in module.parameters()) and not is_unit(module):
            module.to(self.root_device)

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        if not empty_init:
            context: AbstractContextManager[None] = super().module_init_context()
            return context
        return self._on_meta()

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        with torch.device("meta"), self.precision.module_init_context():
            yield

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        module = _unwrapped(module)
        state: dict[str, Any] = _on_rank_0(module) if self._is_saving else module.state_dict()
        return state

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return _optimizer_on_rank_0(optimizer) if self._is_saving else optimizer.state_dict()

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        _unwrapped(module).load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,
    ) -> None:
        if not self._is_sharded_save:
            self._is_saving = True  # rank 0 alone needs the state
            try:
                super().save_checkpoint(path, state, storage_options, filter)
            finally:
                self._is_saving = False
            return
        if storage_options is not None or filter:
            raise TypeError("storage_options and filter need state_dict_type='full'")
        (module, optimizer), rest = _split(state)
        rest = {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in rest.items()}
        self._save_folder(path, module, optimizer, rest)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: Any = None
    ) -> dict[str, Any]:
        path = self.broadcast(path)
        if not os.path.isdir(path):
            full: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            return full
        (module, optimizer), others = _split(state if isinstance(state, dict) else {"": state})
        rest = self._load_folder(path, module, optimizer, strict, weights_only)
        for key in others:
            if key not in rest and strict:
                raise KeyError(f"the checkpoint {os.fspath(path)!r} has no entry {key!r}")
            value = rest.pop(key, others[key])
            if hasattr(others[key], "load_state_dict"):
                others[key].load_state_dict(value)
            else:
                state[key] = value
        return rest


class _BackwardSync:
    """Fabric's no_backward_sync()."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = _unwrapped(module).no_sync()
        return context if enabled else nullcontext()


class _Wrapper(nn.Module):
    """What Fabric takes for a wrapped module, so that it sends marked methods through forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _unwrapped(module: nn.Module) -> Any:
    return module.module if isinstance(module, _Wrapper) else module


def _split(state: dict[str, Any]) -> tuple[tuple[nn.Module, Optimizer | None], dict[str, Any]]:
    """Return the one module and the optimizer of a dict for fabric.save(), and its other entries."""
    modules = [each for each in state.values() if isinstance(each, nn.Module)]
    optimizers = [each for each in state.values() if isinstance(each, Optimizer)]
    if len(modules) != 1 or len(optimizers) > 1:
        raise ValueError(
            "state_dict_type='sharded' saves one module and at most one optimizer, got "
            f"{len(modules)} and {len(optimizers)}: use state_dict_type='full'"
        )
    rest = {k: v for k, v in state.items() if not isinstance(v, nn.Module | Optimizer)}
    return (_unwrapped(modules[0]), optimizers[0] if optimizers else None), rest


def _callable_parts(module: nn.Module) -> list[nn.Module]:
    """Return the modules below `module` that a training_step() may call; a ModuleList is none."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found += _callable_parts(child)
        elif not is_unit(child) and next(child.parameters(), None) is not None:
            found.append(child)
    return found


def _recompute(module: nn.Module, policy: Any) -> None:
    """Have activations of some submodules be recomputed in backward."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    if callable(policy):
        apply_activation_checkpointing(module, auto_wrap_policy=policy)
    else:
        kinds = tuple(policy)
        apply_activation_checkpointing(module, check_fn=lambda each: isinstance(each, kinds))


def _on_rank_0(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's full state dict; on other ranks an empty one."""
    config = torch.distributed.fsdp.FullStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(module, "FULL_STATE_DICT", config):
        return module.state_dict()


def _optimizer_on_rank_0(optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's full state dict; on other ranks an empty one."""
    optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper has it
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        gather(optimizer, keep=False)
        return {}
    state: dict[str, Any] = optimizer.state_dict()
    return state


# --- the summary of the model -----------------------------------------------------------------------

_tables = importlib.import_module(f"{_trainer.__name__}.utilities.model_summary.model_summary")


class _FullLayer(_tables.LayerSummary):  # type: ignore[misc]
    @property
    def num_parameters(self) -> int:
        return sum(map(full_numel, self._module.parameters()))


class _FullSummary(_tables.ModelSummary):  # type: ignore[misc]
    """Lightning's table of a model, which counts full parameters."""

    def summarize(self) -> dict[str, Any]:
        layers: dict[str, Any] = super().summarize()
        for layer in layers.values():
            layer.__class__ = _FullLayer
        return layers

    @property
    def total_parameters(self) -> int:
        return sum(map(full_numel, self._model.parameters()))

    @property
    def trainable_parameters(self) -> int:
        return sum(full_numel(p) for p in self._model.parameters() if p.requires_grad)


def _summary_of(callback: Any) -> Callable[[Any, nn.Module], Any]:
    return lambda _, module: _FullSummary(module, max_depth=callback._max_depth)


_trainer.strategies.StrategyRegistry.register(
    "zshard", ZShardStrategy, description="zshard: sharded data-parallel training", override=True
)
_fabric.strategies.STRATEGY_REGISTRY.register(
    "zshard", ZShardFabricStrategy, description="zshard: sharded modules", override=True
)
