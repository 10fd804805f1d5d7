"""Guarded slices: what a script may do with a shard of a parameter, and what it is told."""
