"""What is sharded, and for how long: the values of `sharding_strategy`.

The one idea: a strategy has one name, whoever spells it: a string, `zshard.ShardingStrategy`, or
torch's own `torch.distributed.fsdp.ShardingStrategy`, so that scripts move by changing the import.
"""

from __future__ import annotations

import enum
from typing import Any


class ShardingStrategy(str, enum.Enum):
    """The strategies. Each is also taken as its string value.

    FULL_SHARD: parameters, gradients and optimizer state sharded (ZeRO-3).
    SHARD_GRAD_OP: the same, but parameters stay whole from forward to backward (ZeRO-2).
    NO_SHARD: everything on every rank, gradients averaged (DDP).
    HYBRID_SHARD: FULL_SHARD within groups of ranks (the ranks of a host, say), each group a whole
        copy of the model; gradients averaged over all ranks (HSDP).
    HYBRID_SHARD_ZERO2: the same with SHARD_GRAD_OP in the groups.
    ZERO1: as FULL_SHARD, and each rank keeps the parameters whole: they are gathered once after
        each optimizer step (ZeRO-1).
    HYBRID_FULL: the same within groups: parameters are kept sharded over the ranks of a group,
        slices and optimizer state lie over all ranks (HFSDP; ZeRO++'s hpZ).

    Over shm the last two are FULL_SHARD: all parameters can be read where they lie, so that keeping
    another copy would only cost memory.
    """

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    NO_SHARD = "no_shard"
    HYBRID_SHARD = "hybrid_shard"
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"
    ZERO1 = "zero1"
    HYBRID_FULL = "hybrid_full"

    @property
    def is_hybrid(self) -> bool:
        """Is the model gathered within groups that each have a copy of it?"""
        return self in _HYBRIDS

    @property
    def keeps(self) -> bool:
        """Does a copy of the parameters stay between steps, besides the slices?"""
        return self in (ShardingStrategy.ZERO1, ShardingStrategy.HYBRID_FULL)

    @property
    def in_group(self) -> ShardingStrategy:
        """What happens among the ranks that one copy of the model is cut over."""
        return _IN_GROUPS.get(self, self)


_IN_GROUPS = {
    ShardingStrategy.HYBRID_SHARD: ShardingStrategy.FULL_SHARD,
    ShardingStrategy.HYBRID_SHARD_ZERO2: ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.ZERO1: ShardingStrategy.FULL_SHARD,
    ShardingStrategy.HYBRID_FULL: ShardingStrategy.FULL_SHARD,
}
_HYBRIDS = {
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.HYBRID_SHARD_ZERO2,
    ShardingStrategy.HYBRID_FULL,
}
_ALIASES = {
    "_hybrid_shard_zero2": ShardingStrategy.HYBRID_SHARD_ZERO2,
    "zero3": ShardingStrategy.FULL_SHARD,
    "zero2": ShardingStrategy.SHARD_GRAD_OP,
    "ddp": ShardingStrategy.NO_SHARD,
}


def parse_strategy(value: Any) -> ShardingStrategy:
    """The strategy that `value` names (a string, or an enum member with such a name).

    Raises ValueError for an unknown one, TypeError for what is no name.
    """
    name = value.name if isinstance(value, enum.Enum) else value
    if not isinstance(name, str):
        raise TypeError(f"sharding_strategy is a string or an enum member, not {value!r}")
    key = name.lower()
    if key in _ALIASES:
        return _ALIASES[key]
    try:
        return ShardingStrategy(key)
    except ValueError:
        known = ", ".join(repr(s.value) for s in ShardingStrategy)
        raise ValueError(f"unknown sharding_strategy {name!r}; there are {known}") from None
