"""Guarded shards: what a script may do with a shard of a parameter, and the errors for the rest."""
