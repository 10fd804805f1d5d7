"""Ranks: process groups, the transports between ranks, and how ranks agree."""
