"""Memory: what a model takes, whether it fits, and what needs less."""
