"""Settings of a warm-up."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WarmupOptions"]


@dataclass(frozen=True, slots=True)
class WarmupOptions:
    """Settings of a warm-up.

    Attributes:
        budget_bytes: Bytes that may be written to each tier; None for no limit.
        skip_bad_lines: Whether to skip lines that are no usable prompts; else they are fatal.
        new_cache: Whether a new cache may be filled although the store has a cache of the same
            model with other settings.
        dry_run: Whether to choose the prompts, but compute nothing.
        retain_s: Time for which the prompts' chunks are not evicted, within the tiers'
            ``retain_quota``; None to leave them to the eviction policy.
        servers: Addresses of running servers to warm up in place; empty to start an engine.
    """

    budget_bytes: int | None = None
    skip_bad_lines: bool = False
    new_cache: bool = False
    dry_run: bool = False
    retain_s: float | None = None
    servers: tuple[str, ...] = ()
