"""What a warm-up reports while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier.warmup._coverage import Coverage
from kvtier.warmup._prefill import PrefillState
from kvtier.warmup._prompts import BadLine

__all__ = [
    "EngineStarted",
    "Finished",
    "LineSkipped",
    "Planned",
    "Progress",
    "PromptsRead",
    "Saving",
    "Verified",
    "WarmupEvent",
    "WarmupReport",
    "progress_of",
]


@dataclass(frozen=True, slots=True)
class LineSkipped:
    """A line is no usable prompt."""

    bad: BadLine


@dataclass(frozen=True, slots=True)
class PromptsRead:
    """The file was read.

    Attributes:
        prompts: Number of prompts.
        tokens: Their tokens.
        skipped: Lines that were skipped.
    """

    prompts: int
    tokens: int
    skipped: int


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """The engine runs, and has opened the stores.

    Attributes:
        stores: Directory of the engine's namespace in each persistent tier, by tier.
    """

    stores: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Planned:
    """It is known what will be computed.

    Attributes:
        prompts: Prompts to compute.
        tokens: Tokens to compute, if every shared prefix is computed once.
        nbytes: Bytes to write to each tier; None if it is not known before an engine starts.
        stored: Prompts that are stored already.
        shared: Prompts that others of the file contain.
        short: Prompts shorter than one chunk, which no tier stores.
        left_out: Prompts for which the budget or the capacity has no room.
        before: How far the prompts would hit now.
    """

    prompts: int
    tokens: int
    nbytes: int | None
    stored: int
    shared: int
    short: int
    left_out: int
    before: Coverage


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the computation is.

    Attributes:
        prompts: Prompts computed so far.
        tokens: Tokens computed or loaded for them, of those planned.
        planned_tokens: Tokens that were planned.
        tokens_per_s: Rate so far; 0 if unknown.
        left_s: Estimated time left; None if unknown.
        unwritten_chunks: Chunks that a persistent tier must still receive.
    """

    prompts: int
    tokens: int
    planned_tokens: int
    tokens_per_s: float
    left_s: float | None
    unwritten_chunks: int


def progress_of(state: PrefillState, planned_tokens: int) -> Progress:
    """Return how far ``state`` is."""
    rate = state.tokens / state.seconds if state.seconds else 0.0
    left = max(planned_tokens - state.tokens, 0)
    return Progress(
        prompts=state.prompts,
        tokens=state.tokens,
        planned_tokens=planned_tokens,
        tokens_per_s=rate,
        left_s=left / rate if rate else None,
        unwritten_chunks=state.unwritten_chunks,
    )


@dataclass(frozen=True, slots=True)
class Verified:
    """Chunks of a tier were read and compared with their checksums.

    Attributes:
        tier: Name of the tier.
        chunks: Chunks that were read.
        bad: Chunks with other bytes.
    """

    tier: str
    chunks: int
    bad: int


@dataclass(frozen=True, slots=True)
class Saving:
    """What the stored prompts save each time that all of them come once.

    Attributes:
        compute_s: Time to compute the tokens that can be loaded, at the rate of this warm-up.
        load_s: Time to load them, at the measured rate of the disk.
    """

    compute_s: float
    load_s: float


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """The result of a warm-up.

    Attributes:
        planned: What was to be computed.
        prompts: Prompts that were computed.
        failed: Prompts that the engine refused, each with its line and the reason.
        computed_tokens: Tokens that were computed.
        seconds: Time of the computation.
        coverage: How far the prompts would hit now; None if the stores are on another machine.
        nbytes_per_token: Bytes of stored KV of a token.
        verified: What was read and compared.
        saving: Expected saving; None if nothing was measured.
        retained_chunks: Chunks that tiers keep until the time that was asked for.
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
        """Return whether everything that was planned is stored, and no chunk is bad."""
        if self.failed or any(each.bad for each in self.verified):
            return False
        stored = self.planned.before.whole + self.prompts
        return self.coverage is None or self.coverage.whole >= stored


@dataclass(frozen=True, slots=True)
class Finished:
    """The warm-up ended."""

    report: WarmupReport


WarmupEvent = (
    LineSkipped | PromptsRead | EngineStarted | Planned | Progress | Verified | Finished
)
