"""Replays traces in simulated time, with the cache manager of a live engine."""
