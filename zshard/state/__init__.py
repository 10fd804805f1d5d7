"""State dicts: of modules and of optimizers, full and sharded, and how they are loaded."""
