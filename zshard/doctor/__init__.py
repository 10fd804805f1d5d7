"""python -m zshard doctor: what this machine has, and which limits ranks meet."""
