"""Units: what is stored about each, and this rank's shards of their parameters."""
