"""The strategy for Lightning's Fabric, and what it shares with the Trainer's.

FSDP shards a module in place, so Lightning's model stays the user's object. Fabric routes marked
methods through the forward of its wrapper, so Fabric's strategy provides a plain one.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from zshard.api import (
    ARGUMENTS,
    FSDP,
    broadcast_buffers,
    class_of,
    did_you_mean,
    gather_state,
    is_unit,
    load,
    on_all_ranks,
    ranks_of,
    save,
    state_dict_form,
    units_of,
)

_PACKAGES = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))
_LIGHTNINGS = frozenset(  # arguments of its DDPStrategy; in Fabric `precision`
    {
        *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "timeout"),
        *("precision", "precision_plugin", "process_group_backend", "start_method"),
    }
)
_CHUNK = 8 << 20  # bytes; one value of a checkpoint's `extra` may have twice as many


def _imported() -> tuple[Any, Any]:
    """Return the Lightning packages that the script uses, for the Trainer and for Fabric."""
    for trainer, fabric in sorted(_PACKAGES, key=sys.modules.keys().isdisjoint):
        try:
            return importlib.import_module(trainer), importlib.import_module(fabric)
        except ModuleNotFoundError as error:
            if error.name not in {trainer, fabric, trainer.partition(".")[0]}:
                raise
    raise ImportError("zshard.lightning needs Lightning: install it (pip install lightning)")


trainer_package, fabric_package = _imported()
RecomputePolicy = Collection[type[nn.Module]] | Callable[..., bool]


class Sharding:
    """Base of both strategies: shards modules, and saves and loads sharded ones."""

    root_device: torch.device
    broadcast: Callable[[Any], Any]

    def __init__(
        self,
        *,
        state_dict_type: Literal["full", "sharded"] = "full",
        activation_checkpointing_policy: RecomputePolicy | None = None,
        device_mesh: DeviceMesh | tuple[int, int] | None = None,
        **arguments: Any,
    ) -> None:
        for name in arguments.keys() - ARGUMENTS - _LIGHTNINGS:
            hint = did_you_mean(name, ARGUMENTS | _LIGHTNINGS)
            raise TypeError(f"{type(self).__name__} has no argument {name!r}: omit it{hint}")
        if state_dict_type not in ("full", "sharded"):
            raise ValueError(
                f"state_dict_type must be 'full' or 'sharded', got {state_dict_type!r}"
            )
        super().__init__(**{name: arguments.pop(name) for name in arguments.keys() & _LIGHTNINGS})
        self._is_sharded_save = state_dict_type == "sharded"
        self._mesh, self._fsdp = device_mesh, arguments
        self._recomputed = activation_checkpointing_policy

    def _shard(self, module: nn.Module, world: int, parts_too: bool = False) -> None:
        """Shard a module over all ranks; with `parts_too`, its children can be called directly."""
        for each, state in units_of(module):
            if state.comms.all.world != world:
                raise ValueError(
                    f"{class_of(each).__name__} is sharded over {state.comms.all.world} rank(s), "
                    f"but Lightning runs {world}: leave zshard.FSDP to the strategy"
                )
        policy = self._recomputed
        if callable(policy):
            apply_activation_checkpointing(module, auto_wrap_policy=policy)
        elif policy is not None:
            kinds = tuple(policy)
            apply_activation_checkpointing(module, check_fn=lambda each: isinstance(each, kinds))
        arguments = {"forward_sync_buffers": "training", **self._fsdp}
        if isinstance(self._mesh, tuple):
            self._mesh = init_device_mesh(self.root_device.type, self._mesh)
        if self._mesh is not None:
            arguments["device_mesh"] = self._mesh
        if self.root_device.type != "cpu":
            arguments.setdefault("device_id", self.root_device)
        for part in (*(_callable_parts(module) if parts_too else ()), module):
            FSDP(part, **arguments)

    def _save_folder(
        self, file: object, module: nn.Module, optimizer: Optimizer | None, rest: dict[str, Any]
    ) -> None:
        path: str = os.fspath(self.broadcast(file))
        chunks: list[bytes] = []
        comm = ranks_of(module)
        with on_all_ranks(comm):
            if comm.rank == 0:
                os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
                data = io.BytesIO()
                torch.save(rest, data)
                raw = data.getvalue()
                chunks = [raw[i : i + _CHUNK] for i in range(0, len(raw), _CHUNK)]
                if os.path.isfile(path):
                    os.unlink(path)
        save(path, module, optimizer, extra={"lightning": chunks}, overwrite=True)

    def _load_folder(
        self,
        path: str | os.PathLike[str],
        module: nn.Module,
        optimizer: Optimizer | None,
        strict: bool,
        weights_only: bool | None,
    ) -> dict[str, Any]:
        loaded = load(path, module, optimizer, strict=strict)
        chunks = self.broadcast(loaded.get("lightning"))
        if not chunks:
            raise ValueError(f"{path!r} was not saved by Lightning: call zshard.load(path, model)")
        rest: dict[str, Any] = torch.load(io.BytesIO(b"".join(chunks)), weights_only=weights_only)
        return rest


def _callable_parts(module: nn.Module) -> list[nn.Module]:
    """Return the modules below `module` that a training_step() may call, without ModuleLists."""
    parts: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            parts += _callable_parts(child)
        elif not is_unit(child) and next(child.parameters(), None) is not None:
            parts.append(child)
    return parts


def on_rank_0(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's full state dict; on other ranks an empty one."""
    with state_dict_form(module, rank0_only=True):
        return module.state_dict()


def optimizer_on_rank_0(optimizer: Optimizer) -> Any:
    """Return the optimizer's full state dict; on other ranks an empty one."""
    optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper has it
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        gather_state(optimizer, keep=False)
        return {}
    return optimizer.state_dict()


# --- Fabric ---------------------------------------------------------------------------------------


_Ddp: Any = fabric_package.strategies.DDPStrategy


class ZShardFabricStrategy(Sharding, _Ddp):  # type: ignore[misc]
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
        self._backward_sync_control = self
        self._is_saving = False
        self._sharded: WeakIdKeyDictionary = WeakIdKeyDictionary()  # in setup order

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return FSDP.no_sync(_unwrapped(module)) if enabled else nullcontext()

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

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        device = torch.device("meta") if empty_init else nullcontext()
        usual: Any = self.precision if empty_init else super()
        with device, usual.module_init_context():
            yield

    def get_module_state_dict(self, module: nn.Module) -> Any:
        module = _unwrapped(module)
        return on_rank_0(module) if self._is_saving else module.state_dict()

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer_on_rank_0(optimizer) if self._is_saving else optimizer.state_dict()

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        _unwrapped(module).load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self, path: object, state: Any, storage_options: object = None, filter: object = None
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
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> Any:
        path = self.broadcast(path)
        if not os.path.isdir(path):
            return super().load_checkpoint(path, state, strict, weights_only)
        (module, optimizer), others = _split(state if isinstance(state, dict) else {"": state})
        rest = self._load_folder(path, module, optimizer, strict, weights_only)
        for key, old in others.items():
            if key not in rest and strict:
                raise KeyError(f"{path!r} has no entry {key!r}: pass strict=False")
            value = rest.pop(key, old)
            if hasattr(old, "load_state_dict"):
                old.load_state_dict(value)
            else:
                state[key] = value
        return rest


class _Wrapper(nn.Module):
    """Passes as Fabric's wrapper, so that Fabric routes marked methods through forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: object, **kwargs: object) -> Any:
        return self.module(*args, **kwargs)


def _unwrapped(module: nn.Module) -> Any:
    return module.module if isinstance(module, _Wrapper) else module


def _split(state: dict[str, Any]) -> tuple[tuple[nn.Module, Optimizer | None], dict[str, Any]]:
    modules = [value for value in state.values() if isinstance(value, nn.Module)]
    optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
    if len(modules) != 1 or len(optimizers) > 1:
        raise ValueError(
            f"{len(modules)} modules and {len(optimizers)} optimizers: use state_dict_type='full'"
        )
    rest = {k: v for k, v in state.items() if not isinstance(v, nn.Module | Optimizer)}
    return (_unwrapped(modules[0]), optimizers[0] if optimizers else None), rest
