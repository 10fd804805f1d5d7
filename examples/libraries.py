"""One function per library: how zshard, DDP, FSDP2 and FSDP1 each take a plain model.

All return the same three things (model, optimizer, gradient clipping), so that train_gpt.py has one
training loop for all of them. zshard comes first: the rest is here to be compared with.
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
    """A model made ready by a library; `clip(max_norm)` returns the gradients' norm before it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[float], Any]


class Options(NamedTuple):
    """What train_gpt.py's flags say about sharding; see its --help."""

    strategy: str
    lr: float
    transport: str | None = None
    auto_wrap: bool = True


def use_zshard(model: GPT, options: Options) -> Sharded:
    """zshard: the repeated blocks are found by itself, parameters keep names and dimensions."""
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
    """torch's DistributedDataParallel: every rank holds everything."""
    replica = nn.parallel.DistributedDataParallel(model)
    return Sharded(replica, _fused_adamw(decay_groups(replica), options.lr), _clip(replica))


def use_fsdp2(model: GPT, options: Options) -> Sharded:
    """torch's fully_shard, called for each block and then for the rest, as its manual says."""
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
    """torch's FullyShardedDataParallel with one flat parameter a block."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    groups = decay_groups(model)  # before wrapping: after it every parameter has one dimension
    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[options.strategy.upper()],
        auto_wrap_policy=ModuleWrapPolicy({Block}) if options.auto_wrap else None,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return Sharded(wrapped, _fused_adamw(groups, options.lr), wrapped.clip_grad_norm_)


class Library(NamedTuple):
    """How to wrap, and the strategies that the library has; the first is the default."""

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
    """Join torchrun's gloo group, or make a group of one; yields (rank, world size)."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.get_rank(), dist.get_world_size()
        # gloo's threads drop the last collective's tensors a moment after it ends. If Python is
        # shutting down by then, the process aborts; a barrier, which holds none, lets it pass.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def mean_over_ranks(values: list[float]) -> list[float]:
    """Each value's mean over all ranks, in float64; all ranks must call this together."""
    summed = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(summed)
    return (summed / dist.get_world_size()).tolist()


def gather_from_ranks(value: Any) -> list[Any]:
    """The ranks' values (anything that pickles), by rank; all ranks must call this together."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _fused_adamw(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """torch's fastest AdamW: the default one is three times slower on a CPU."""
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)


def _clip(model: nn.Module) -> Callable[[float], Tensor]:
    return lambda max_norm: nn.utils.clip_grad_norm_(model.parameters(), max_norm)
