"""Refuse what of torch's cannot work on models that zshard has wrapped.

DistributedDataParallel and ZeroRedundancyOptimizer broadcast parameters from one rank
to the others. They would take a rank's slices for the whole model, and where slices have equal
shapes, nothing would fail. Pruning replaces parameters, after it has looked at their elements: a
rank without any would see nothing amiss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import utils as dist_utils
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

from zshard import _core
from zshard._errors import ShardError
from zshard.units.shards import part_of
from zshard.units.units import is_unit, state_of, units_of

__all__ = ["check_optimizer", "install"]


def install() -> None:
    """Have torch's classes check what they are given. Idempotent."""
    for cls, check in ((DistributedDataParallel, _check_ddp), (torch.optim.Optimizer, _check_zero)):
        if not hasattr(cls.__init__, "_zshard_checks"):
            cls.__init__ = _checked(cls.__init__, check)  # type: ignore[method-assign]
    if not hasattr(prune.BasePruningMethod.apply, "_zshard_checks"):
        refusing = _refusing_shards(prune.BasePruningMethod.apply)
        prune.BasePruningMethod.apply = refusing  # type: ignore[method-assign]
    if not hasattr(dist_utils._sync_module_states, "__wrapped__"):
        dist_utils._sync_module_states = _refusing(dist_utils._sync_module_states)


def _refusing(sync: Callable[..., None]) -> Callable[..., None]:
    """DDP's first step, which Lightning's DDP takes by itself before it validates or tests."""

    @functools.wraps(sync)
    def refusing(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if any(_core.is_shard(param) for param in module.parameters()):
            name = type(module).__name__
            raise TypeError(
                f"this {name} is sharded by zshard, and DDP would broadcast rank 0's shards to the "
                'other ranks: in Lightning, pass strategy="zshard" to this Trainer, too'
            )
        sync(module, *args, **kwargs)

    return refusing


def _refusing_shards(apply: Any) -> Any:
    """Pruning of one parameter, which all functions of torch.nn.utils.prune come to."""

    def checked(
        cls: type[Any], module: nn.Module, name: str, *args: Any, **kwargs: Any
    ) -> prune.BasePruningMethod:
        param = getattr(module, name, None)
        part = part_of(param) if isinstance(param, torch.Tensor) else None
        if part is not None:
            raise ShardError(
                f"pruning replaces parameter '{part.name}' after FSDP(...), where a rank has a "
                "shard of it: prune the model before FSDP(...), on all ranks alike; or zero "
                "elements within `with FSDP.summon_full_params(model):`"
            )
        pruned: prune.BasePruningMethod = apply.__func__(cls, module, name, *args, **kwargs)
        return pruned

    checked._zshard_checks = True  # type: ignore[attr-defined]
    return classmethod(functools.wraps(apply.__func__)(checked))


def _checked(init: Callable[..., None], check: Callable[[Any, Any], None]) -> Callable[..., None]:
    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        given = args[0] if args else kwargs.get("module", kwargs.get("params"))
        check(self, given)
        init(self, *args, **kwargs)

    checked._zshard_checks = True  # type: ignore[attr-defined]
    return checked


def _check_ddp(_: Any, module: Any) -> None:
    if not isinstance(module, nn.Module) or next(iter(units_of(module)), None) is None:
        return
    units = [(each, state_of(each)) for each in module.modules() if is_unit(each)]
    strategy = units[0][1].unit.strategy
    raise TypeError(
        f"DistributedDataParallel cannot wrap a model that zshard has wrapped ({strategy}): zshard "
        "reduces gradients itself, and DDP would broadcast rank 0's shards to the other ranks. "
        'Remove DDP; for its behaviour, use FSDP(model, strategy="no_shard"). If a trainer '
        "added it (Accelerate, transformers, Lightning), use zshard's adapter: docs/trainers.md"
    )


def _check_zero(optimizer: Any, params: Any) -> None:
    """Torch's ZeroRedundancyOptimizer hands a list to its base class."""
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer" and isinstance(params, list):
        _refuse_zero(p for p in params if isinstance(p, torch.Tensor))


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise TypeError if it is a ZeroRedundancyOptimizer over sharded parameters."""
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        _refuse_zero(p for group in optimizer.param_groups for p in group["params"])


def _refuse_zero(params: Any) -> None:
    if any(_core.is_shard(param) for param in params):
        raise TypeError(
            "ZeroRedundancyOptimizer cannot step parameters that zshard has sharded: it would "
            "broadcast one rank's shards to the other ranks. Pass them to the optimizer itself, "
            "such as torch.optim.AdamW: its state is sharded as the parameters are"
        )
