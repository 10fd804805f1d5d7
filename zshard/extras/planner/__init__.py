"""Predicts memory and speed of a training run without the GPUs: zshard.plan().

workloads.py says what is trained, kernels.py what that computes; prediction.py predicts one way to
do so on a cluster (durations.py, timeline.py), and search.py looks for the best way.
benchmarks/predictions.py holds predictions against published runs.
"""

from zshard.extras.planner.decoder import Dims as Dims
from zshard.extras.planner.search import Plan as Plan
from zshard.extras.planner.search import plan as plan

__all__ = ["Dims", "Plan", "plan"]
