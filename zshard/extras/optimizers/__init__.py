"""Optimizers with state in 8 bits, and those whose step needs whole matrices, of which each is
stepped on one rank, its owner."""
