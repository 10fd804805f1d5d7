"""The strategy for Lightning's Fabric.

Fabric's DDP strategy with a sharded module in place of DDP's wrapper. Fabric routes marked methods
through the forward of its wrapper, so this file provides a plain one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from zshard.lightning.sharding import Sharding, fabric_package, on_rank_0, optimizer_on_rank_0
from zshard.model.shard_model import broadcast_buffers
from zshard.units.units import is_unit

__all__ = ["ZShardFabricStrategy"]


class ZShardFabricStrategy(Sharding, fabric_package.strategies.DDPStrategy):  # type: ignore[misc]
    """Lightning's Fabric with modules that zshard shards.

    ::

        import zshard.lightning
        fabric = Fabric(accelerator="cpu", devices=2, strategy="zshard")

    fabric.setup() shards the module in place. Clipping, no_backward_sync() and
    mark_forward_method() work as under DDP.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision,
        process_group_backend, timeout, start_method: those of Fabric's DDPStrategy.
        state_dict_type: "full" (the default): fabric.save() writes one file, the same as under DDP.
            "sharded": it writes a folder of zshard.save(), of one module and at most one optimizer.
        activation_checkpointing_policy, device_mesh, **fsdp: see ZShardStrategy.

    Raises TypeError and ValueError as ZShardStrategy does.
    """

    strategy_name = "zshard"

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._backward_sync_control = _BackwardSync()
        self._is_saving = False
        self._sharded: WeakIdKeyDictionary = WeakIdKeyDictionary()  # in setup order

    def setup_module(self, module: nn.Module) -> nn.Module:
        if not is_unit(module):
            self._shard(module, self.world_size)
        self._sharded[module] = None
        return _Wrapper(module)

    def backward(self, *args: object, **kwargs: object) -> None:
        """Run a backward, then broadcast buffers: an evaluation under DDP would start with that
        broadcast, but here one rank may evaluate alone."""
        super().backward(*args, **kwargs)
        for module in list(self._sharded):
            broadcast_buffers(module)

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module that will not be sharded; FSDP moves the others, one unit at a time."""
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
        state: dict[str, Any] = on_rank_0(module) if self._is_saving else module.state_dict()
        return state

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer_on_rank_0(optimizer) if self._is_saving else optimizer.state_dict()

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        _unwrapped(module).load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: object,
        state: dict[str, Any],
        storage_options: object = None,
        filter: object = None,
    ) -> None:
        if not self._is_sharded_save:
            self._is_saving = True  # only rank 0 needs the state
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
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
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
    """The module that Fabric takes for its wrapper, so that it routes marked methods through
    forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self.module(*args, **kwargs)


def _unwrapped(module: nn.Module) -> Any:
    return module.module if isinstance(module, _Wrapper) else module


def _split(state: dict[str, Any]) -> tuple[tuple[nn.Module, Optimizer | None], dict[str, Any]]:
    """Return the one module and the optimizer to save, and the other entries."""
    modules = [each for each in state.values() if isinstance(each, nn.Module)]
    optimizers = [each for each in state.values() if isinstance(each, Optimizer)]
    if len(modules) != 1 or len(optimizers) > 1:
        raise ValueError(
            "state_dict_type='sharded' saves one module and at most one optimizer, got "
            f"{len(modules)} and {len(optimizers)}: use state_dict_type='full'"
        )
    rest = {k: v for k, v in state.items() if not isinstance(v, nn.Module | Optimizer)}
    return (_unwrapped(modules[0]), optimizers[0] if optimizers else None), rest
