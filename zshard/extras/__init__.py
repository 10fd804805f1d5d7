"""Features on top of the core that a plain script does without: averages, exports, kept runs,
readers of others' checkpoints, more optimizers, the launcher and the planner. zshard/__init__.py
lists their public names."""
