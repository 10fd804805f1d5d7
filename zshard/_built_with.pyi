# The build writes this module: see setup.py.
TORCH: str
