"""Strategies, the values of `strategy`: which tensors are sharded, and for how long.

A strategy has one name, given as a string or as a `zshard.ShardingStrategy`.
"""

from __future__ import annotations

import enum

from zshard._errors import did_you_mean


class ShardingStrategy(enum.StrEnum):
    """Sharding strategies. FSDP also accepts each as its string value ("full_shard", ...), or the
    name in parentheses.

    FULL_SHARD: parameters, gradients and optimizer state are sharded (ZeRO-3).
    SHARD_GRAD_OP: FULL_SHARD, but parameters stay unsharded from forward to backward (ZeRO-2).
    NO_SHARD: every rank has everything; gradients are averaged (DDP).
    HYBRID_SHARD: FULL_SHARD within each shard group (for example, the ranks of a host), with one
        replica of the model per group; gradients are averaged over all ranks (HSDP).
    HYBRID_SHARD_ZERO2: SHARD_GRAD_OP within each shard group.
    ZERO1: gradients and optimizer state are sharded; every rank keeps full parameters, which are
        all-gathered once after each optimizer step (ZeRO-1).
    HYBRID_FULL: optimizer state and gradients are sharded over all ranks; each shard group keeps
        secondary shards of the parameters, updated once after each optimizer step (HFSDP; hpZ of
        ZeRO++).

    Over shm, ZERO1 and HYBRID_FULL behave like FULL_SHARD: all ranks can read all shards in place,
    so keeping copies would only cost memory.
    """

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"
    NO_SHARD = "no_shard"
    HYBRID_SHARD = "hybrid_shard"
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"
    ZERO1 = "zero1"
    HYBRID_FULL = "hybrid_full"
    _HYBRID_SHARD_ZERO2 = HYBRID_SHARD_ZERO2  # FSDP1's name

    def __eq__(self, other: object) -> bool:
        """Equal torch's members of the same meaning, and their names as strings."""
        if type(other).__name__ == "ShardingStrategy" and isinstance(other, enum.Enum):
            return other.name.lstrip("_") == self.name
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other  # str defines its own

    def __hash__(self) -> int:
        return str.__hash__(self)

    @property
    def is_hybrid(self) -> bool:
        """Return whether parameters are gathered within shard groups that each hold a replica of
        the model."""
        return self in _HYBRIDS

    @property
    def has_secondary(self) -> bool:
        """Return whether secondary shards of the parameters stay between steps."""
        return self in (ShardingStrategy.ZERO1, ShardingStrategy.HYBRID_FULL)

    @property
    def in_group(self) -> ShardingStrategy:
        """Return the strategy among the ranks that one replica of the model is sharded over."""
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
    "zero3": ShardingStrategy.FULL_SHARD,
    "fsdp": ShardingStrategy.FULL_SHARD,
    "zero2": ShardingStrategy.SHARD_GRAD_OP,
    "zero0": ShardingStrategy.NO_SHARD,
    "ddp": ShardingStrategy.NO_SHARD,
    "hsdp": ShardingStrategy.HYBRID_SHARD,
    "hfsdp": ShardingStrategy.HYBRID_FULL,
}
_NAMES = {each.value: each for each in ShardingStrategy} | _ALIASES


def _plain(name: str) -> str:
    """Return a name as it is compared: "ZeRO-3" and "zero_3" are "zero3"."""
    return name.lower().replace("-", "").replace("_", "")


_BY_PLAIN_NAME = {_plain(name): each for name, each in _NAMES.items()}


def strategy_of(asked: object) -> ShardingStrategy:
    """Return the strategy that a string or an enum member, such as torch's, names.

    Raises ValueError for an unknown name, TypeError for any other type.
    """
    value = asked.name if isinstance(asked, enum.Enum) else asked
    if not isinstance(value, str):
        raise TypeError(f"strategy must be a string or an enum member, got {value!r}")
    strategy = _BY_PLAIN_NAME.get(_plain(value))
    if strategy is None:
        names, hint = ", ".join(map(repr, _NAMES)), did_you_mean(value, _NAMES)
        raise ValueError(f"unknown strategy {value!r}, expected one of {names}{hint}")
    return strategy
