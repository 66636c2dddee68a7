"""Replays traces against the very objects a live engine runs, in model time."""
