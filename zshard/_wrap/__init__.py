"""Before a model is sharded: its tree, the choice of units, the arguments, first values."""
