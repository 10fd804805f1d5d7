"""One function per library: how zshard, DDP, FSDP2 and FSDP1 wrap a plain model.

All return the same three things (model, optimizer, gradient clipping), so train_gpt.py has one
training loop for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpt import GPT, Block
from torch import Tensor, nn

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


class Sharded(NamedTuple):
    """A wrapped model; `clip(max_norm)` clips the gradients and returns their norm before that."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[float], Any]


class Options(NamedTuple):
    """The flags of train_gpt.py that concern sharding; see its --help."""

    strategy: str
    lr: float
    transport: str | None = None
    auto_wrap: bool = True


def use_zshard(model: GPT, options: Options) -> Sharded:
    """zshard: finds the repeated blocks; parameters keep their names and shapes."""
    from zshard import FSDP, AdamW

    sharded = FSDP(
        model,
        strategy=options.strategy,
        transport=options.transport,
        auto_wrap_policy="auto" if options.auto_wrap else None,
    )
    optimizer = AdamW(decay_groups(sharded), lr=options.lr, betas=BETAS)
    return Sharded(sharded, optimizer, sharded.clip_grad_norm_)


def use_ddp(model: GPT, options: Options) -> Sharded:
    """torch's DistributedDataParallel: every rank holds the full model."""
    replica = nn.parallel.DistributedDataParallel(model)
    return Sharded(replica, _fused_adamw(decay_groups(replica), options.lr), _clip(replica))


def use_fsdp2(model: GPT, options: Options) -> Sharded:
    """torch's fully_shard, applied to each block and then to the model, as its docs recommend."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    settings: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "reshard_after_forward": options.strategy == "full_shard",
    }
    for block in model.blocks if options.auto_wrap else ():
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return Sharded(model, _fused_adamw(decay_groups(model), options.lr), _clip(model))


def use_fsdp1(model: GPT, options: Options) -> Sharded:
    """torch's FullyShardedDataParallel with one flat parameter per block."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    groups = decay_groups(model)  # before wrapping, which flattens the parameters
    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[options.strategy.upper()],
        auto_wrap_policy=ModuleWrapPolicy({Block}) if options.auto_wrap else None,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return Sharded(wrapped, _fused_adamw(groups, options.lr), wrapped.clip_grad_norm_)


class Library(NamedTuple):
    """A function that wraps a model, and the library's strategies; the first is the default."""

    use: Callable[[GPT, Options], Sharded]
    strategies: tuple[str, ...]


LIBRARIES = {
    "zshard": Library(use_zshard, ("full_shard", "shard_grad_op", "no_shard")),
    "ddp": Library(use_ddp, ("no_shard",)),
    "fsdp2": Library(use_fsdp2, ("full_shard", "shard_grad_op")),
    "fsdp1": Library(use_fsdp1, ("full_shard", "shard_grad_op", "no_shard")),
}


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups for AdamW: weight decay for matrices, none for biases and norms."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


@contextmanager
def process_group() -> Iterator[tuple[int, int]]:
    """Join torchrun's gloo group, or create one of a single process; yields (rank, world size).

    A group that is there already is used, and stays.
    """
    if dist.is_initialized():
        yield dist.get_rank(), dist.get_world_size()
        return
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.get_rank(), dist.get_world_size()
        # gloo's threads release the last collective's tensors shortly after it ends. If Python
        # is shutting down by then, the process aborts; a barrier, which has none, avoids that.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def mean_over_ranks(values: list[float]) -> list[float]:
    """Each value's mean over all ranks, in float64. Collective."""
    summed = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(summed)
    return (summed / dist.get_world_size()).tolist()


def gather_from_ranks(value: Any) -> list[Any]:
    """All ranks' values (any picklable object), by rank. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _fused_adamw(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """torch's fastest AdamW: the default is three times slower on CPUs."""
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)


def _clip(model: nn.Module) -> Callable[[float], Tensor]:
    return lambda max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm)
