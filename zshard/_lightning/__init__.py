"""Strategies for Lightning's Trainer and Fabric; zshard/lightning.py registers them."""
