"""zshard's benchmarks: run one with `python -m benchmarks.step_time`, all with `make bench`."""
