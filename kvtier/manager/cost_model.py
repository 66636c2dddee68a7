"""Whether a load is worth its time: what would take longer than computing is computed.

A slower tier usually gives a chunk back in a fraction of the time it takes to compute it. A
disk that is busy, worn or far away does not, and then a cache makes requests slower than none.
So before chunks are brought up for a request, the time of that is compared with the time of
computing the tokens it saves, both as :mod:`kvtier.manager.estimates` has measured them.

Which head of a prefix pays is said in :mod:`kvtier.manager.weighing`. Here is when it is asked,
and how what is not known, or no longer, is found out.

Where nothing is known yet, chunks are loaded: the load's deadline bounds what that can cost.
An estimate that is not renewed is believed less and less: it halves every ten seconds, for the
purpose of trying again only, and one try at a time loads 16 MiB at most, or one chunk, if
nothing is loaded from the tier anyway. A tier that was slow for a while is so found out to have
recovered, and one that is hopelessly slow is tried ever less often than it is slow.

A tier whose estimate had to be raised to a bound is loaded from by such tries only, until one
arrives and tells how slow it is: otherwise each of ever smaller loads would have to run into
its deadline first. Of several KV cache groups a part is of no use to the request, but as good a
measurement, and the whole may be gigabytes: the try is no larger there, and only its bytes are
wasted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.manager.estimates import ComputeTimes, LoadPrice, LoadTimes
from kvtier.manager.weighing import LoadChoice, SkipCause, Weighing
from kvtier.types import JobId, Outcome, TransferResult

__all__ = ["CostFigures", "CostModel"]

_TRY_NBYTES: Final = 16 << 20
_IN_TIME: Final = 0.8
"""Share of a load's deadline that may be planned for: an estimate is a mean, and a job that is
a little late has moved its bytes for nothing."""


@dataclass(frozen=True, slots=True)
class CostFigures:
    """The estimates now, and what followed from them so far.

    Attributes:
        prices: What loading takes, tier by tier; None where nothing was measured.
        recompute_s_per_token: What computing takes; None where nothing was measured.
        skipped_chunks: Chunks, tier by tier, that were not loaded because of it.
        skipped_tokens: Prompt tokens they stand for.
        last: The latest load that was not done, or not wholly.
    """

    prices: Sequence[LoadPrice | None]
    recompute_s_per_token: float | None
    skipped_chunks: Sequence[int]
    skipped_tokens: Sequence[int]
    last: LoadChoice | None


class CostModel:
    """Decides how much of a prefix is loaded, from what loads and computing have taken.

    Pure: time arrives with the measurements. One object serves one manager.

    Args:
        tiers: Number of tiers, RAM included.
        chunk_nbytes: Bytes that move for a chunk.
        chunk_tokens: Tokens that a chunk saves; 0 makes every load worth it.
        recompute_s_per_token: What computing takes; None to go by :meth:`record_prefill`.
        margin: How many times the computing time a load may take; infinite for any.

    Attributes:
        last: The latest load that was not done, or not wholly.
    """

    def __init__(
        self,
        *,
        tiers: int,
        chunk_nbytes: int,
        chunk_tokens: int,
        recompute_s_per_token: float | None = None,
        margin: float = 1.0,
    ) -> None:
        self._chunk_nbytes = chunk_nbytes
        self._try_chunks = max(_TRY_NBYTES // chunk_nbytes, 1)
        self._chunk_tokens = chunk_tokens
        self._fixed_s_per_token = recompute_s_per_token
        self._margin = margin
        self._times = [LoadTimes() for _ in range(tiers)]
        self._outstanding_nbytes = [0] * tiers
        self._jobs: dict[JobId, tuple[int, int, int]] = {}
        self._in_time_s = math.inf
        self._computing = ComputeTimes()
        self._skipped_chunks = [0] * tiers
        self._skipped_tokens = [0] * tiers
        self.last: LoadChoice | None = None

    # -- measuring --------------------------------------------------------------------------

    def record_job(self, job_id: JobId, tier: int, chunks: int) -> None:
        """Note a job that reads ``chunks`` chunks of a tier for a request that waits."""
        nbytes = chunks * self._chunk_nbytes
        self._outstanding_nbytes[tier] += nbytes
        self._jobs[job_id] = (tier, nbytes, self._outstanding_nbytes[tier])

    def record_result(self, result: TransferResult, *, timeout_s: float, now: float) -> None:
        """Take the result of a job into account; jobs that are not known are ignored.

        Args:
            result: The result.
            timeout_s: The job's deadline: what one that expired took at least, and what later
                loads are to be done in.
            now: Seconds on the clock of :meth:`choose`.
        """
        job = self._jobs.pop(result.job_id, None)
        if job is None:
            return
        tier, nbytes, awaited_nbytes = job
        self._outstanding_nbytes[tier] -= nbytes
        self._in_time_s = _IN_TIME * timeout_s
        times = self._times[tier]
        seconds = result.queued_s + result.seconds
        if Outcome.EXPIRED in result.outcomes:
            if result.settled and not result.seconds:
                times.measured_s = now  # it never ran, yet the tier was no faster than thought
            else:
                times.note_bound(awaited_nbytes, timeout_s, now)
        elif Outcome.DONE in result.outcomes and seconds > 0.0:
            times.note(awaited_nbytes, seconds, now)
        # Else it failed, which is not slow, or was refused or cancelled, which says nothing.

    def record_prefill(self, tokens: int, seconds: float, now: float) -> None:
        """Note that a step of the engine computed ``tokens`` prompt tokens.

        Steps of few are mostly about something else, and are ignored.

        Args:
            tokens: Prompt tokens.
            seconds: What the step took.
            now: Seconds on the clock of :meth:`choose`.
        """
        self._computing.note(tokens, seconds, now)

    @property
    def recompute_s_per_token(self) -> float | None:
        """What computing a prompt token takes; None where nothing was measured."""
        if self._fixed_s_per_token is not None:
            return self._fixed_s_per_token
        return self._computing.s_per_token

    # -- deciding ---------------------------------------------------------------------------

    def choose(self, sources: Sequence[int], *, counted: int, now: float) -> LoadChoice | None:
        """Say how much of what a request found is worth loading.

        Args:
            sources: Index of the tier each chunk would come from, in the order asked; 0 for
                those that are in RAM or on their way there.
            counted: How many of the chunks stand for tokens of their own. If not all of them do
                they are of several KV cache groups, and all is loaded or nothing but a try: a
                group that is cut makes the chunks of the others useless.
            now: Seconds on a monotonic clock.

        Returns:
            None if all of it.
        """
        s_per_token = self.recompute_s_per_token
        if s_per_token is None or not self._chunk_tokens or self._margin == math.inf:
            return None
        slow = {tier for tier in sources if tier}
        prices = {tier: p for tier in slow if (p := self._times[tier].price()) is not None}
        if not prices:
            return None
        each_tokens = self._chunk_tokens * counted / len(sources)
        chunk_s = each_tokens * s_per_token * self._computing.waiting(now)
        weighing = Weighing(
            sources=sources,
            divisible=counted == len(sources),
            chunk_nbytes=self._chunk_nbytes,
            chunk_s=chunk_s,
            gain_s=self._margin * chunk_s,
            prices=prices,
            outstanding_nbytes=self._outstanding_nbytes,
            in_time_s=self._in_time_s,
            try_chunks=self._try_chunks,
        )
        whole = weighing.best()
        proven = weighing.probed(whole, {tier for tier in prices if self._times[tier].bounded})
        kept = proven if proven == len(sources) else self._tried(weighing, proven, now)
        if kept == len(sources):
            return None
        cause = weighing.cause(whole) if proven == whole else SkipCause.UNPROVEN
        return weighing.choice(kept, each_tokens, cause)

    def record_skip(self, choice: LoadChoice | None) -> None:
        """Count what is certain now not to be loaded; nothing for None."""
        if choice is None:
            return
        self.last = choice
        for tier, chunks in choice.skipped.items():
            self._skipped_chunks[tier] += chunks
            self._skipped_tokens[tier] += round(chunks * choice.tokens_per_chunk)

    @property
    def skipped_chunks(self) -> int:
        """Chunks that were not loaded so far."""
        return sum(self._skipped_chunks)

    def figures(self) -> CostFigures:
        """Return the estimates and the counts now."""
        return CostFigures(
            prices=[times.price() for times in self._times],
            recompute_s_per_token=self.recompute_s_per_token,
            skipped_chunks=tuple(self._skipped_chunks),
            skipped_tokens=tuple(self._skipped_tokens),
            last=self.last,
        )

    # -- internals --------------------------------------------------------------------------

    def _tried(self, weighing: Weighing, kept: int, now: float) -> int:
        """Return ``kept``, or more if nothing is on its way that would be a measurement."""
        tiers = weighing.prices
        if any(self._outstanding_nbytes[tier] for tier in tiers):
            return kept
        hoped = {tier: p for tier in tiers if (p := self._times[tier].hoped(now)) is not None}
        return weighing.tried(kept, hoped)
