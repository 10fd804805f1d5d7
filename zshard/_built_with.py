"""The torch that zshard was compiled against. Written by setup.py."""

TORCH = "2.13.0+cpu"
