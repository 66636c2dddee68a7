"""A trace against real tiers and real bytes, by an engine that has everything but a model."""

from __future__ import annotations

from kvtier.replay._replay import ReplayOptions, ReplayResult, replay_trace

__all__ = ["ReplayOptions", "ReplayResult", "replay_trace"]
