"""Reads prompts from files, and counts the stored tokens of each prompt."""

from __future__ import annotations

from kvtier.coverage._arguments import ParsedArguments, open_vllm, to_prompt
from kvtier.coverage._coverage import (
    Coverage,
    CoverageReader,
    KeyRules,
    PromptCoverage,
    StoredKeys,
    Stores,
)
from kvtier.coverage._hashing import BlockHasher, Scope
from kvtier.coverage._namespaces import namespaces_of_model
from kvtier.coverage._prompts import (
    BadLine,
    Prompt,
    PromptLine,
    check_prompt,
    load_prompts,
)

__all__ = [
    "BadLine",
    "BlockHasher",
    "Coverage",
    "CoverageReader",
    "KeyRules",
    "ParsedArguments",
    "Prompt",
    "PromptCoverage",
    "PromptLine",
    "Scope",
    "StoredKeys",
    "Stores",
    "check_prompt",
    "load_prompts",
    "namespaces_of_model",
    "open_vllm",
    "to_prompt",
]
