"""Replays traces in simulated time, through the code of a live engine."""
