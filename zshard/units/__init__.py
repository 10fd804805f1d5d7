"""Units: the state of each, and this rank's shards of their parameters."""
