"""Replays a trace with real tiers and real bytes on an engine without a model."""

from __future__ import annotations

from kvtier.replay._replay import ReplayOptions, ReplayResult, replay_trace

__all__ = ["ReplayOptions", "ReplayResult", "replay_trace"]
