"""What stands on the core and a plain script does without: exports, kept runs, whole-matrix
optimizers, readers of others' checkpoints, traces, the launcher and the planner. zshard/__init__.py
lists their public names."""
