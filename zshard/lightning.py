"""Lightning's strategies, registered as "zshard": see zshard/integrations/lightning."""

from zshard.integrations.lightning import ZShardFabricStrategy, ZShardStrategy

__all__ = ["ZShardFabricStrategy", "ZShardStrategy"]
