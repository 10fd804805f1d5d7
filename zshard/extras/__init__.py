"""What stands on the core and a plain script does without. `from zshard import ...` imports the
module that has a name."""
