"""Optimizers whose step needs whole matrices: each matrix is stepped on one rank, its owner."""
