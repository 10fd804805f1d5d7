"""The planner, zshard.plan(): see zshard/extras/planner."""

from zshard.extras.planner import Dims, Plan, plan

__all__ = ["Dims", "Plan", "plan"]
