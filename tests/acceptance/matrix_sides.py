"""DDP, FSDP2 and zshard behind one interface, each as its users write it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zshard

Full = dict[str, torch.Tensor]


class Ddp:
    """DistributedDataParallel; rank 0 saves by torch.save."""

    writer = 0  # the rank that writes last
    checks: Mapping[str, Any] = {}
    unused: Mapping[str, Any] = {"find_unused_parameters": True}  # where ranks use other parameters
    ignoring = ""  # the argument for parameters that are left to the script
    data = "state.pt"  # a file with values
    index = "state.pt"  # the file that a load reads first
    third = "state-3.pt"  # the file of a third rank

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        return DistributedDataParallel(model, **options)

    def replicated(self, model: nn.Module) -> nn.Module:
        return self.wrap(model)

    def inner(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def full(self, model: nn.Module) -> Full:
        """Return copies of the full values by the plain model's names."""
        return {name: value.clone() for name, value in self.inner(model).state_dict().items()}

    def value(self, param: torch.Tensor) -> torch.Tensor:
        """Return the full value of a parameter."""
        return param.detach()

    def save(self, folder: Path, model: nn.Module, optimizer: Any, **options: Any) -> None:
        if dist.get_rank() == 0:
            folder.mkdir(exist_ok=True)
            state = {"model": self.inner(model).state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, folder / self.data)
        dist.barrier()

    def joined(self, model: Any, batches: Iterable[Any]) -> Iterable[Any]:
        """Iterate over batches, where ranks have different numbers of them."""
        with model.join():
            yield from batches

    def begin(self, timeout: float) -> None:
        """Create the process group where wrap() does not."""
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))

    def load(self, folder: Path, model: nn.Module, optimizer: Any) -> None:
        state = torch.load(folder / self.data)
        self.inner(model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


class Fsdp2(Ddp):
    """fully_shard of each child and of the model; torch.distributed.checkpoint."""

    writer = 1
    unused: Mapping[str, Any] = {}
    ignoring = "ignored_params"
    data = "__1_0.distcp"
    index = ".metadata"
    third = "__2_0.distcp"

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        for child in model.children():
            if next(child.parameters(), None) is not None:
                fully_shard(child, **options)
        return fully_shard(model, **options)

    def replicated(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
        return self.wrap(model, mesh=mesh)

    def inner(self, model: nn.Module) -> nn.Module:
        return model

    def full(self, model: nn.Module) -> Full:
        return {name: self.value(v).clone() for name, v in model.state_dict().items()}

    def value(self, param: torch.Tensor) -> torch.Tensor:
        return (param.full_tensor() if isinstance(param, DTensor) else param).detach()

    def _state(self, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    def save(self, folder: Path, model: nn.Module, optimizer: Any, **options: Any) -> None:
        dcp.save(self._state(model, optimizer), checkpoint_id=folder)

    def save_later(self, folder: Path, model: nn.Module, optimizer: Any) -> Any:
        """Save in the background; return what waits for it."""
        group = dist.new_group(backend="gloo")  # apart from training's collectives
        state = self._state(model, optimizer)
        return dcp.async_save(state, checkpoint_id=folder, process_group=group).result

    def load(self, folder: Path, model: nn.Module, optimizer: Any) -> None:
        state = self._state(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **states)


class Zshard(Ddp):
    """FSDP, full_shard, each child a unit; zshard.save."""

    writer = 1
    checks: Mapping[str, Any] = {"nonfinite": "raise"}
    unused: Mapping[str, Any] = {}
    ignoring = "ignored_states"
    data = "model.safetensors"
    index = "zshard.json"
    third = "model-00003-of-00003.safetensors"

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        units = {type(child) for child in model.children()}
        return zshard.FSDP(model, auto_wrap_policy=units, **options)

    def replicated(self, model: nn.Module) -> nn.Module:
        return self.wrap(model, strategy="no_shard", check_replicas=1)

    def value(self, param: torch.Tensor) -> torch.Tensor:
        return zshard.full_tensor(param.detach())

    def joined(self, model: Any, batches: Iterable[Any]) -> Iterable[Any]:
        return model.join(batches)

    def begin(self, timeout: float) -> None:
        pass

    def save(self, folder: Path, model: nn.Module, optimizer: Any, **options: Any) -> None:
        zshard.save(folder, model, optimizer, **options)

    def save_later(self, folder: Path, model: nn.Module, optimizer: Any) -> Any:
        return zshard.save(folder, model, optimizer, asynchronous=True).wait

    def load(self, folder: Path, model: nn.Module, optimizer: Any) -> None:
        zshard.load(folder, model, optimizer)


BY_NAME: dict[str, Ddp] = {"ddp": Ddp(), "fsdp2": Fsdp2(), "zshard": Zshard()}
