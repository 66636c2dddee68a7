"""Warm-up: computes known prompts, stores their KV, and reports which prompts are stored."""

from __future__ import annotations

from kvtier.warmup._coverage import (
    Coverage,
    CoverageReader,
    KeyRules,
    PromptCoverage,
    StoredKeys,
    Stores,
)
from kvtier.warmup._engine import EngineSetup, WarmupEngine, open_vllm, to_prompt
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
from kvtier.warmup._hashing import BlockHasher, Scope
from kvtier.warmup._job import WarmupJob
from kvtier.warmup._plan import Work
from kvtier.warmup._prompts import BadLine, Prompt, PromptLine, load_prompts
from kvtier.warmup._stores import namespaces_of_model

__all__ = [
    "BadLine",
    "BlockHasher",
    "Coverage",
    "CoverageReader",
    "EngineSetup",
    "FillState",
    "Finished",
    "KeyRules",
    "LineSkipped",
    "Planned",
    "Progress",
    "Prompt",
    "PromptCoverage",
    "PromptLine",
    "Saving",
    "Scope",
    "StoredKeys",
    "Stores",
    "Target",
    "Verified",
    "WarmupEngine",
    "WarmupEvent",
    "WarmupJob",
    "WarmupOptions",
    "WarmupReport",
    "Work",
    "fill",
    "load_prompts",
    "namespaces_of_model",
    "open_vllm",
    "to_prompt",
]
