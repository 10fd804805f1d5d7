"""shard(Accelerator()): see zshard/integrations/accelerate.py."""

from zshard.integrations.accelerate import shard

__all__ = ["shard"]
