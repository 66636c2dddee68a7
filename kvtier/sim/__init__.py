"""Replays traces in model time with the same code as a live engine."""
