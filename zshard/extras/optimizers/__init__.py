"""Optimizers with state in 8 bits, and those whose step needs whole matrices: one rank, its owner,
steps each of these."""
