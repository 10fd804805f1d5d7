"""What a sharded model can do besides a step: copies, summon, join, generate, its methods."""
