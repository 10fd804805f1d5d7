"""Features of a sharded model besides a step: copies, summon, join, generate, its methods."""
