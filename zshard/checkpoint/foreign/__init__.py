"""Checkpoints of others, read as zshard's own: torch files, DCP folders, Hugging Face shards."""
