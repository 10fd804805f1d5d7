"""Ranks: groups of them, the transports between them, and how they agree."""
