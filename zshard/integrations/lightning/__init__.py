"""Train with zshard under Lightning: `Trainer(strategy="zshard")` and `Fabric(strategy="zshard")`.

    import zshard.lightning
    trainer = Trainer(accelerator="cpu", devices=2, strategy="zshard")

Importing this module registers the name "zshard". It needs Lightning: the package `lightning`, or
`pytorch_lightning` and `lightning_fabric` if the script has imported these. See docs/lightning.md.
"""

from __future__ import annotations

from zshard.integrations.lightning.fabric import (
    ZShardFabricStrategy,
    fabric_package,
    trainer_package,
)
from zshard.integrations.lightning.trainer import ZShardStrategy

__all__ = ["ZShardFabricStrategy", "ZShardStrategy"]

for _registry, _strategy in (
    (trainer_package.strategies.StrategyRegistry, ZShardStrategy),
    (fabric_package.strategies.STRATEGY_REGISTRY, ZShardFabricStrategy),
):
    _registry.register("zshard", _strategy, description="zshard: sharded", override=True)
