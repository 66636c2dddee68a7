"""The events that a warm-up yields while it runs."""

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
    """Event: a line of the file was skipped, because it is no usable prompt."""

    bad: BadLine


@dataclass(frozen=True, slots=True)
class PromptsRead:
    """Event: the file of prompts was read.

    Attributes:
        prompts: Number of prompts.
        tokens: Number of tokens of all prompts.
        skipped: Number of lines that were skipped.
    """

    prompts: int
    tokens: int
    skipped: int


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """Event: the engine runs, and has opened its stores.

    Attributes:
        stores: Directory of the engine's namespace in each persistent tier, by tier.
    """

    stores: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Planned:
    """Event: the prompts to compute were chosen.

    Attributes:
        prompts: Prompts to compute.
        tokens: Tokens to compute, if every shared prefix is computed once.
        nbytes: Bytes to write to each tier; None if it is not known before an engine starts.
        stored: Prompts that are stored already.
        shared: Prompts whose chunks are all in other prompts of the file.
        short: Prompts shorter than one chunk, which no tier stores.
        left_out: Prompts for which the budget or the capacity has no room.
        before: How many tokens of the prompts could be loaded before the warm-up.
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
    """Event: progress of the computation.

    Attributes:
        prompts: Prompts computed so far.
        tokens: Planned tokens that were computed or loaded so far.
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
    """Return the event that reports the progress in ``state``."""
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
    """Event: chunks of a tier were read and compared with their checksums.

    Attributes:
        tier: Name of the tier.
        chunks: Chunks that were read.
        bad: Chunks that do not match their checksums.
    """

    tier: str
    chunks: int
    bad: int


@dataclass(frozen=True, slots=True)
class Saving:
    """The time that the stored prompts save each time that every prompt is used once.

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
        planned: The prompts that were to be computed.
        prompts: Prompts that were computed.
        failed: Prompts that the engine refused, each with its line and the reason.
        computed_tokens: Tokens that were computed.
        seconds: Time of the computation.
        coverage: How many tokens of the prompts can be loaded now; None if the stores are on
            another machine.
        nbytes_per_token: Bytes of stored KV per token.
        verified: The chunks that were read and compared, per tier.
        saving: Expected saving; None if nothing was measured.
        retained_chunks: Chunks protected from eviction for the requested time.
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
        """Return whether every planned prompt is stored, and no chunk is bad."""
        if self.failed or any(each.bad for each in self.verified):
            return False
        stored = self.planned.before.whole + self.prompts
        return self.coverage is None or self.coverage.whole >= stored


@dataclass(frozen=True, slots=True)
class Finished:
    """Event: the warm-up ended; the last event of a run."""

    report: WarmupReport


WarmupEvent = (
    LineSkipped | PromptsRead | EngineStarted | Planned | Progress | Verified | Finished
)
