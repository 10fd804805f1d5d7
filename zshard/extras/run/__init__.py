"""`python -m zshard run`: cores, threads and memory of the ranks of this host."""
