"""shard(Trainer): see zshard/integrations/transformers.py."""

from zshard.integrations.transformers import shard

__all__ = ["shard"]
