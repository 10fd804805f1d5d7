"""python -m zshard doctor: what this machine has, and the limits that ranks will hit."""
