"""Shared tiers for engines of tests: a section of the YAML file for each service."""

from __future__ import annotations

from pathlib import Path

from tests.demo.model import BLOCK_TOKENS, KV_NBYTES_PER_BLOCK
from tests.demo.scenario import Report, Wave

__all__ = ["cached_tokens", "reusable_tokens", "write_config"]


def write_config(path: Path, section: str, *, ram_blocks: int) -> Path:
    """Write a configuration of RAM and a shared tier.

    Args:
        path: The file.
        section: The shared tier's keys, a line each.
        ram_blocks: Capacity of RAM in blocks of the tiny model.
    """
    lines = "\n".join(f"    {line}" for line in section.splitlines())
    path.write_text(
        f"tiers:\n  - kind: ram\n    capacity: {ram_blocks * KV_NBYTES_PER_BLOCK}B\n  -\n"
        f"{lines}\n    lookup_timeout: 2s\n"
    )
    return path


def reusable_tokens(wave: Wave) -> int:
    """Return the prompt tokens of ``wave`` whose blocks an earlier engine has stored."""
    return sum(
        (len(prompt.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in wave.prompts
    )


def cached_tokens(report: Report) -> int:
    """Return the prompt tokens that an engine did not compute."""
    return sum(answer.cached_tokens for answer in report.answers())
