"""Replays a trace with real tiers and real bytes on an engine without a model."""

from __future__ import annotations

from kvtier.replay._replay import ReplayOptions, ReplayResult, open_engine, replay_trace
from kvtier.replay._requests import make_requests

__all__ = ["ReplayOptions", "ReplayResult", "make_requests", "open_engine", "replay_trace"]
