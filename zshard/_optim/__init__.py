"""Optimizers over shards: the step, what goes with it, clipping, steps in backward."""
