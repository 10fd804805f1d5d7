"""The failure matrix: each fault of sharded training on CPUs, injected under DDP, FSDP2 and zshard.

`python -m benchmarks.failures` runs it; tools/failure_page.py writes docs/failures.md of the
result. A row (rows.txt) is a short script over `Job` (job.py), the same for the three libraries
(sides.py).
"""
