"""The settings of a warm-up, the events that it yields, and its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.coverage import BadLine, Coverage

__all__ = [
    "Finished",
    "LineSkipped",
    "Planned",
    "Progress",
    "Saving",
    "Verified",
    "WarmupEvent",
    "WarmupOptions",
    "WarmupReport",
]


@dataclass(frozen=True, slots=True)
class WarmupOptions:
    """Settings of a warm-up.

    Attributes:
        budget_bytes: Number of bytes that may be written to each tier; None for no limit.
        skip_bad_lines: Whether to skip lines without a usable prompt. If False, such a line is
            an error.
        new_cache: Whether to fill a new cache if the cache directory has a cache of the same
            model with other settings.
        dry_run: Whether to choose the prompts without computing them.
        retain_s: Seconds during which the prompts' chunks are protected from eviction, within
            the tiers' ``retain_quota``; None to leave them to the eviction policy.
        servers: Addresses of running servers to warm up in place; empty to start an engine.
    """

    budget_bytes: int | None = None
    skip_bad_lines: bool = False
    new_cache: bool = False
    dry_run: bool = False
    retain_s: float | None = None
    servers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LineSkipped:
    """Event: a line without a usable prompt was skipped."""

    bad: BadLine


@dataclass(slots=True)
class Planned:
    """Event: the prompts to compute were chosen.

    Attributes:
        prompts: Number of prompts to compute.
        tokens: Number of tokens to compute, if every shared prefix is computed once.
        nbytes: Number of bytes to write to each tier; None if a chunk's size is unknown.
        stored: Number of prompts that are stored already.
        shared: Number of prompts whose missing chunks all belong to earlier prompts of the
            file.
        short: Number of prompts shorter than one chunk. No tier stores these prompts.
        left_out: Number of prompts that do not fit into the budget or the capacity.
        before: The prompts' coverage before the warm-up.
    """

    prompts: int = 0
    tokens: int = 0
    nbytes: int | None = 0
    stored: int = 0
    shared: int = 0
    short: int = 0
    left_out: int = 0
    before: Coverage = field(default_factory=Coverage)


@dataclass(frozen=True, slots=True)
class Progress:
    """Event: progress of the computation.

    Attributes:
        prompts: Number of prompts computed so far.
        tokens: Number of planned tokens computed or loaded so far.
        planned_tokens: Number of planned tokens.
        tokens_per_s: Tokens per second so far; 0 if unknown.
        unwritten_chunks: Number of chunks that a persistent tier must still receive.
    """

    prompts: int
    tokens: int
    planned_tokens: int
    tokens_per_s: float
    unwritten_chunks: int


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of comparing a tier's chunks with their checksums.

    Attributes:
        tier: Name of the tier.
        chunks: Number of chunks that were read.
        bad: Number of chunks with wrong checksums.
    """

    tier: str
    chunks: int
    bad: int


@dataclass(frozen=True, slots=True)
class Saving:
    """The time that the stored prompts save if every prompt is used once.

    Attributes:
        compute_s: Seconds to compute the loadable tokens at the rate of this warm-up.
        load_s: Seconds to load these tokens at the measured rate of the disks.
    """

    compute_s: float
    load_s: float


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """The result of a warm-up.

    Attributes:
        planned: The event that reported the plan.
        prompts: Number of computed prompts.
        failed: Prompts that the engine refused, each with its line and the reason.
        computed_tokens: Number of computed tokens.
        seconds: Seconds that the computation took.
        coverage: The prompts' coverage after the warm-up; None if the caches are on another
            machine.
        nbytes_per_token: Number of bytes of stored KV per token.
        verified: The result of the checksum check, per tier.
        saving: Expected saving; None without a measurement.
        retained_chunks: Number of chunks protected from eviction for the requested time.
    """

    planned: Planned
    prompts: int
    failed: Sequence[BadLine]
    computed_tokens: int
    seconds: float
    coverage: Coverage | None
    nbytes_per_token: float = 0.0
    verified: Sequence[Verified] = ()
    saving: Saving | None = None
    retained_chunks: int = 0

    @property
    def is_complete(self) -> bool:
        """Return whether every planned prompt is stored and no chunk has a wrong checksum."""
        if self.failed or any(each.bad for each in self.verified):
            return False
        stored = self.planned.before.whole + self.prompts
        return self.coverage is None or self.coverage.whole >= stored


@dataclass(frozen=True, slots=True)
class Finished:
    """Event: the warm-up ended. No event follows."""

    report: WarmupReport


WarmupEvent = LineSkipped | Planned | Progress | Finished
