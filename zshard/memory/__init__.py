"""Memory: how much a model takes, whether it fits, and which settings take less."""
