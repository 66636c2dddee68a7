"""Warm-up: computes known prompts, stores their KV, and reports which prompts a store has."""

from __future__ import annotations

from kvtier.warmup._coverage import (
    Coverage,
    CoverageReader,
    KeyRules,
    PromptCoverage,
    StoredKeys,
)
from kvtier.warmup._engine import EngineSetup, WarmupEngine, open_vllm, to_prompt
from kvtier.warmup._events import (
    EngineStarted,
    Finished,
    LineSkipped,
    Planned,
    Progress,
    PromptsRead,
    Saving,
    Verified,
    WarmupEvent,
    WarmupReport,
)
from kvtier.warmup._hashing import BlockHasher, Scope
from kvtier.warmup._identity import namespaces_of_model
from kvtier.warmup._job import WarmupJob
from kvtier.warmup._options import WarmupOptions
from kvtier.warmup._prompts import BadLine, Prompt, PromptLine, read_prompts
from kvtier.warmup._spool import PromptSpool
from kvtier.warmup._stores import nbytes_per_token

__all__ = [
    "BadLine",
    "BlockHasher",
    "Coverage",
    "CoverageReader",
    "EngineSetup",
    "EngineStarted",
    "Finished",
    "KeyRules",
    "LineSkipped",
    "Planned",
    "Progress",
    "Prompt",
    "PromptCoverage",
    "PromptLine",
    "PromptSpool",
    "PromptsRead",
    "Saving",
    "Scope",
    "StoredKeys",
    "Verified",
    "WarmupEngine",
    "WarmupEvent",
    "WarmupJob",
    "WarmupOptions",
    "WarmupReport",
    "namespaces_of_model",
    "nbytes_per_token",
    "open_vllm",
    "read_prompts",
    "to_prompt",
]
