"""Warm-up: computes known prompts and stores their KV."""

from __future__ import annotations

from kvtier.warmup._engine import EngineSetup, WarmupEngine
from kvtier.warmup._events import (
    Finished,
    LineSkipped,
    Planned,
    Progress,
    Saving,
    Verified,
    WarmupEvent,
    WarmupOptions,
    WarmupReport,
)
from kvtier.warmup._filling import FillState, Target, fill
from kvtier.warmup._job import WarmupJob
from kvtier.warmup._plan import Work

__all__ = [
    "EngineSetup",
    "FillState",
    "Finished",
    "LineSkipped",
    "Planned",
    "Progress",
    "Saving",
    "Target",
    "Verified",
    "WarmupEngine",
    "WarmupEvent",
    "WarmupJob",
    "WarmupOptions",
    "WarmupReport",
    "Work",
    "fill",
]
