"""The sides: each trains the same workload by another library, in units of the same size.

A side is a wrapped module with its optimizer. Factories are looked up by name in SIDES; each
seeds torch, builds the module, wraps it and makes the optimizer, so that all sides start from the
same parameters. zshard is imported by its own factory only: the peers can be
measured where it is not built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from benchmarks.models import Batch, Workload

SEED = 1234


@dataclass
class Side:
    """A wrapped module, and the optimizer that updates it; None means that none is run."""

    name: str
    workload: Workload
    module: nn.Module
    optimizer: torch.optim.Optimizer | None

    def forward(self, batch: Batch) -> Tensor:
        """The loss of `batch` on this rank, a scalar with its graph."""
        return self.workload.loss(self.module, batch)

    def zero_grad(self) -> None:
        self.module.zero_grad(set_to_none=True)

    def step(self, batch: Batch) -> Tensor:
        """One whole training step on `batch`; returns this rank's loss without its graph."""
        loss = self.forward(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            self.optimizer.step()
        self.zero_grad()
        return loss.detach()


Parts = tuple[nn.Module, torch.optim.Optimizer | None]
Factory = Callable[[Workload], Parts]


def build_side(name: str, workload: Workload) -> Side:
    """The side called `name` on `workload`, freshly seeded.

    Collective: all ranks build the same sides in one order. Raises KeyError for an unknown name,
    ImportError for a zshard side where zshard is not built.
    """
    torch.manual_seed(SEED)
    module, optimizer = SIDES[name](workload)
    return Side(name, workload, module, optimizer)


def _fused_adamw(module: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=lr, fused=True)


def _compute(workload: Workload) -> Parts:
    return workload.build(), None


def _local(workload: Workload) -> Parts:
    module = workload.build()
    return module, _fused_adamw(module, workload.lr)


def _ddp(bucket_view: bool) -> Factory:
    def build(workload: Workload) -> Parts:
        module = nn.parallel.DistributedDataParallel(
            workload.build(), gradient_as_bucket_view=bucket_view
        )
        return module, _fused_adamw(module, workload.lr)

    return build


def _fsdp1(strategy: str) -> Factory:
    def build(workload: Workload) -> Parts:
        module = FullyShardedDataParallel(
            workload.build(),
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy(workload.units),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        return module, _fused_adamw(module, workload.lr)

    return build


def _fsdp2(reshard: bool) -> Factory:
    def build(workload: Workload) -> Parts:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        module = workload.build()
        for child in module.modules():
            if type(child) in workload.units:
                fully_shard(child, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        return module, _fused_adamw(module, workload.lr)

    return build


def _zshard(strategy: str, transport: str) -> Factory:
    def build(workload: Workload) -> Parts:
        import zshard

        # Named, not left to the automatic choice: a benchmark must not measure a fallback unseen.
        module: Any = zshard.FSDP(
            workload.build(),
            sharding_strategy=strategy,
            auto_wrap_policy=set(workload.units),
            transport=transport if dist.get_world_size() > 1 else None,
        )
        return module, zshard.AdamW(module.parameters(), lr=workload.lr)

    return build


SIDES: dict[str, Factory] = {
    "compute": _compute,
    "local": _local,
    "ddp": _ddp(bucket_view=False),
    "ddp-view": _ddp(bucket_view=True),
    "fsdp1": _fsdp1("FULL_SHARD"),
    "fsdp1-shard_grad_op": _fsdp1("SHARD_GRAD_OP"),
    "fsdp2": _fsdp2(reshard=True),
    "fsdp2-shard_grad_op": _fsdp2(reshard=False),
}
for _strategy in ("full_shard", "shard_grad_op", "no_shard"):
    SIDES[f"zshard-{_strategy}"] = _zshard(_strategy, "shm")
    SIDES[f"zshard-{_strategy}-c10d"] = _zshard(_strategy, "c10d")
