"""Decides whether to load chunks or compute them, by comparing the expected times.

Usually a load from a slower tier takes a fraction of the time to compute the chunk. But a busy,
worn or remote disk may be slower than computing, and then a cache makes requests slower. So
before chunks are promoted for a request, their load time is compared with the compute time of
their tokens. :mod:`kvtier.manager.estimates` estimates both times from measurements.

**Choice of the head.** A *head* is the first chunks of a hit. The chosen head minimizes its
load time minus its compute time. The other chunks of the hit are the *tail*. A loaded head
saves the computation of its tokens even if the tail is not loaded; a tail without its head
saves nothing. Chunks in RAM need no load time, but are useless without all chunks before them.
The times of several tiers are added although loads may overlap. With a sum, a tier that slows
down never makes the chosen head longer; with a maximum it could. A head is cut so that the load
from each tier ends well before the deadline, because chunks that arrive after the deadline are
useless.

**Unknown costs.** Before the first measurement of a tier, its chunks are loaded, because the
deadline bounds the cost. A *sample* is a load that measures a tier again while the tier has no
other load. A sample has at most 16 MiB, or one chunk if chunks are larger. For the decision
about a sample, the estimate is halved for every ten seconds since the last measurement. So a
recovered tier is noticed, and slow tiers are sampled rarely.

If the estimate of a tier is only a lower bound, only samples are loaded from the tier until a
sample arrives. Otherwise a series of ever smaller loads would miss their deadlines. With
several KV cache groups a sample does not help the request, but still measures the tier.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.manager.estimates import ComputeEstimate, LoadCost, LoadEstimate
from kvtier.types import JobId, Outcome, TransferResult

__all__ = ["CostFigures", "CostModel", "LoadChoice", "SkipCause"]

_SAMPLE_NBYTES: Final = 16 << 20
_DEADLINE_SHARE: Final = 0.8
"""Longest planned load time, as a fraction of the deadline. The rest is a margin, because a
load may take longer than its estimate and late bytes are useless."""


class SkipCause(enum.Enum):
    """Reasons to compute chunks although a tier could provide them."""

    SLOWER = enum.auto()
    """Computing was expected to be faster."""
    LATE = enum.auto()
    """Loading was expected to be faster, but to miss its deadline."""
    UNPROVEN = enum.auto()
    """A load from the tier missed its deadline, and no later load from the tier has arrived."""


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """A decision to skip a load, or to load only the first chunks.

    Attributes:
        cause: Reason for the decision.
        kept: Number of leading chunks to load.
        tokens_per_chunk: Mean number of prompt tokens per chunk.
        skipped: Number of skipped chunks, by the index of their tier.
        tokens: Number of prompt tokens that are computed although their chunks were found.
        load_s: Estimated seconds to load all chunks.
        recompute_s: Estimated seconds to compute all chunks.
        nbytes: Number of bytes of all chunks in slower tiers.
        queued_nbytes: Number of bytes in the tiers' queues before this load.
        max_load_s: Largest number of seconds that a load from one tier may take.
    """

    cause: SkipCause
    kept: int
    tokens_per_chunk: float
    skipped: Mapping[int, int]
    tokens: int
    load_s: float
    recompute_s: float
    nbytes: int
    queued_nbytes: int
    max_load_s: float


@dataclass(frozen=True, slots=True)
class CostFigures:
    """The current estimates and the loads skipped so far.

    Attributes:
        load_costs: Cost of a load, per tier; None without a measurement.
        recompute_s_per_token: Seconds to compute a token; None without a measurement.
        skipped_chunks: Number of skipped chunks, per tier.
        skipped_tokens: Number of prompt tokens of the skipped chunks, per tier.
        last: The latest decision to skip or cut a load; None if there is none.
    """

    load_costs: Sequence[LoadCost | None]
    recompute_s_per_token: float | None
    skipped_chunks: Sequence[int]
    skipped_tokens: Sequence[int]
    last: LoadChoice | None


class CostModel:
    """Uses the times of earlier loads and steps to decide how much of a prefix to load.

    The caller passes the time. One object serves one manager.

    Args:
        tiers: Number of tiers, RAM included.
        chunk_nbytes: Number of bytes moved per chunk.
        chunk_tokens: Number of tokens that need no computation when a chunk is loaded; 0 to
            load every chunk.
        recompute_s_per_token: Seconds to compute a token; None to measure this time.

    Attributes:
        last: The latest decision to skip or cut a load; None if there is none.
    """

    def __init__(
        self,
        *,
        tiers: int,
        chunk_nbytes: int,
        chunk_tokens: int,
        recompute_s_per_token: float | None = None,
    ) -> None:
        self._chunk_nbytes = chunk_nbytes
        self._sample_chunks = max(_SAMPLE_NBYTES // chunk_nbytes, 1)
        self._chunk_tokens = chunk_tokens
        self._fixed_s_per_token = recompute_s_per_token
        self._loads = [LoadEstimate() for _ in range(tiers)]
        self._queued_nbytes = [0] * tiers
        self._jobs: dict[JobId, tuple[int, int, int]] = {}
        self._max_load_s = math.inf
        self._computing = ComputeEstimate()
        self._skipped_chunks = [0] * tiers
        self._skipped_tokens = [0] * tiers
        self.last: LoadChoice | None = None

    # -- measuring --------------------------------------------------------------------------

    def record_job(self, job_id: JobId, tier: int, chunks: int) -> None:
        """Record a job that reads ``chunks`` chunks of a tier for a waiting request."""
        nbytes = chunks * self._chunk_nbytes
        self._queued_nbytes[tier] += nbytes
        self._jobs[job_id] = (tier, nbytes, self._queued_nbytes[tier])

    def record_result(self, result: TransferResult, *, timeout_s: float, now: float) -> None:
        """Record the result of a job; unknown jobs are ignored.

        Args:
            result: The result.
            timeout_s: Timeout of this job and of later loads.
            now: Seconds on the clock of :meth:`choose`.
        """
        job = self._jobs.pop(result.job_id, None)
        if job is None:
            return
        tier, nbytes, awaited_nbytes = job
        self._queued_nbytes[tier] -= nbytes
        self._max_load_s = _DEADLINE_SHARE * timeout_s
        estimate = self._loads[tier]
        seconds = result.queued_s + result.seconds
        if Outcome.EXPIRED in result.outcomes:
            if result.settled and not result.seconds:
                # The job never ran, so the tier is no faster than estimated.
                estimate.measured_s = now
            else:
                estimate.record_bound(awaited_nbytes, timeout_s, now)
        elif Outcome.DONE in result.outcomes and seconds > 0.0:
            lost_share = 1 - result.outcomes.count(Outcome.DONE) / len(result.outcomes)
            estimate.record(awaited_nbytes - round(lost_share * nbytes), seconds, now)
        # A job that failed, or was refused or cancelled, measures nothing.

    def record_prefill(self, tokens: int, seconds: float, now: float) -> None:
        """Record that a step of the engine computed ``tokens`` prompt tokens.

        Args:
            tokens: Number of prompt tokens of the step; a step with few prompt tokens is
                ignored.
            seconds: Duration of the step.
            now: Seconds on the clock of :meth:`choose`.
        """
        self._computing.record(tokens, seconds, now)

    @property
    def recompute_s_per_token(self) -> float | None:
        """Seconds to compute a prompt token; None without a measurement."""
        if self._fixed_s_per_token is not None:
            return self._fixed_s_per_token
        return self._computing.s_per_token

    # -- deciding ---------------------------------------------------------------------------

    def choose(self, sources: Sequence[int], *, counted: int, now: float) -> LoadChoice | None:
        """Decide how many chunks of a request's hit to load.

        Args:
            sources: Index of the tier of each chunk, in the order of the load; 0 for chunks in
                RAM or on their way there.
            counted: Number of chunks in the counting group. If ``sources`` has more, there are
                several KV cache groups. Then the choice is to load all chunks, a sample or no
                chunk, because the head of one group alone is useless.
            now: Seconds on a monotonic clock.

        Returns:
            The decision to skip or cut the load; None to load all chunks.
        """
        s_per_token = self.recompute_s_per_token
        if s_per_token is None or not self._chunk_tokens:
            return None
        tiers = {tier for tier in sources if tier}
        costs = {tier: cost for tier in tiers if (cost := self._loads[tier].cost()) is not None}
        if not costs:
            return None
        tokens_per_chunk = self._chunk_tokens * counted / len(sources)
        candidate = _Candidate(
            sources=sources,
            is_divisible=counted == len(sources),
            chunk_nbytes=self._chunk_nbytes,
            recompute_s=tokens_per_chunk * s_per_token * self._computing.sharing_factor(now),
            costs=costs,
            queued_nbytes=self._queued_nbytes,
            max_load_s=self._max_load_s,
        )
        best = candidate.best_head(costs)
        proven = self._proven_head(candidate, best)
        kept = proven
        if proven < len(sources) and not any(self._queued_nbytes[tier] for tier in costs):
            kept = self._sampled_head(candidate, proven, now)
        if kept == len(sources):
            return None
        cause = candidate.cause(best) if proven == best else SkipCause.UNPROVEN
        return candidate.choice(kept, tokens_per_chunk, cause)

    def would_load(self, tier: int, chunks: int, *, counted: int, now: float) -> bool:
        """Return whether :meth:`choose` would load any of ``chunks`` chunks, all in ``tier``.

        The time of this method does not depend on the number of chunks.

        Args:
            tier: Index of the tier.
            chunks: Number of chunks of a hit.
            counted: Number of these chunks in the counting group; at least 1.
            now: Seconds on a monotonic clock.
        """
        s_per_token = self.recompute_s_per_token
        if s_per_token is None or not self._chunk_tokens:
            return True
        estimate, queued_nbytes = self._loads[tier], self._queued_nbytes[tier]
        cost, optimistic = estimate.cost(), estimate.optimistic_cost(now)
        if cost is None or optimistic is None:
            return True
        saved_s = self._chunk_tokens * counted / chunks * s_per_token
        saved_s *= self._computing.sharing_factor(now)

        def pays(cost: LoadCost) -> bool:
            chunk_s, start_s = cost.s_per_byte * self._chunk_nbytes, cost.seconds(queued_nbytes)
            left_s = self._max_load_s - start_s
            if left_s < chunk_s:
                return False
            most = chunks
            if chunks * chunk_s > left_s:
                most = int(left_s // chunk_s) if counted == chunks else 0
            return most * (saved_s - chunk_s) > start_s

        if queued_nbytes:
            return pays(cost) and not estimate.is_bound
        return pays(cost) or pays(optimistic)

    def record_skip(self, choice: LoadChoice | None) -> None:
        """Count the chunks that ``choice`` skips, unless ``choice`` is None."""
        if choice is None:
            return
        self.last = choice
        for tier, chunks in choice.skipped.items():
            self._skipped_chunks[tier] += chunks
            self._skipped_tokens[tier] += round(chunks * choice.tokens_per_chunk)

    @property
    def skipped_chunks(self) -> int:
        """Number of chunks skipped so far."""
        return sum(self._skipped_chunks)

    def figures(self) -> CostFigures:
        """Return the current estimates and counts."""
        return CostFigures(
            load_costs=[estimate.cost() for estimate in self._loads],
            recompute_s_per_token=self.recompute_s_per_token,
            skipped_chunks=tuple(self._skipped_chunks),
            skipped_tokens=tuple(self._skipped_tokens),
            last=self.last,
        )

    def _proven_head(self, candidate: _Candidate, best: int) -> int:
        """Return ``best``, or fewer chunks if the cost of loading them is not measured.

        If the cost of a tier is only a lower bound, at most a sample is loaded from the tier.
        """
        left = {
            tier: 0 if self._queued_nbytes[tier] else self._sample_chunks
            for tier in candidate.costs
            if self._loads[tier].is_bound
        }
        for at, tier in enumerate(candidate.sources[:best]):
            if tier in left:
                if not left[tier]:
                    return at
                left[tier] -= 1
        return best

    def _sampled_head(self, candidate: _Candidate, kept: int, now: float) -> int:
        """Return ``kept``, or a larger number of chunks if a tier should be measured again."""
        costs = {
            tier: cost
            for tier in candidate.costs
            if (cost := self._loads[tier].optimistic_cost(now)) is not None
        }
        length = candidate.best_head(costs)
        sampled = set(candidate.sources[:kept]) - {0}
        left = self._sample_chunks
        for at in range(kept, length):
            tier = candidate.sources[at]
            left -= tier != 0
            if left < 0 or tier in sampled:
                return at
        return max(length, kept)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A prefix that a request could load, and the figures that decide how much of it to load.

    Attributes:
        sources: Index of the tier of each chunk; 0 for RAM.
        is_divisible: Whether the first chunks of the prefix are useful without the rest.
        chunk_nbytes: Number of bytes moved per chunk.
        recompute_s: Seconds to compute a chunk.
        costs: Cost of a load from each measured slower tier.
        queued_nbytes: Number of bytes in each tier's queue before this load.
        max_load_s: Largest number of seconds that a load from one tier may take.
    """

    sources: Sequence[int]
    is_divisible: bool
    chunk_nbytes: int
    recompute_s: float
    costs: Mapping[int, LoadCost]
    queued_nbytes: Sequence[int]
    max_load_s: float

    def best_head(
        self, costs: Mapping[int, LoadCost], *, max_load_s: float | None = None
    ) -> int:
        """Return how many leading chunks to load to save the most time within the deadline."""
        if max_load_s is None:
            max_load_s = self.max_load_s
        load_s = 0.0
        best, best_s = 0, 0.0
        chunk_s = {tier: cost.s_per_byte * self.chunk_nbytes for tier, cost in costs.items()}
        tier_s: dict[int, float] = {}
        for length, tier in enumerate(self.sources, start=1):
            more_s = chunk_s.get(tier)
            if more_s is not None:
                total_s = tier_s.get(tier)
                if total_s is None:
                    more_s += costs[tier].seconds(self.queued_nbytes[tier])
                    total_s = 0.0
                tier_s[tier] = total_s = total_s + more_s
                if total_s > max_load_s:
                    break
                load_s += more_s
            net_s = load_s - length * self.recompute_s
            if net_s < best_s and (self.is_divisible or length == len(self.sources)):
                best, best_s = length, net_s
        return best

    def cause(self, best: int) -> SkipCause:
        """Return the reason why only the first ``best`` chunks are loaded."""
        unlimited = self.best_head(self.costs, max_load_s=math.inf)
        return SkipCause.LATE if unlimited > best else SkipCause.SLOWER

    def choice(self, kept: int, tokens_per_chunk: float, cause: SkipCause) -> LoadChoice:
        """Return the decision to load only the first ``kept`` chunks."""
        sources, chunk_nbytes = self.sources, self.chunk_nbytes
        wanted = {tier: sources.count(tier) for tier in sorted(set(sources) - {0})}
        tail = sources[kept:]
        queued = {tier: self.queued_nbytes[tier] for tier in wanted}
        return LoadChoice(
            cause=cause,
            kept=kept,
            tokens_per_chunk=tokens_per_chunk,
            skipped={tier: chunks for tier in wanted if (chunks := tail.count(tier))},
            tokens=round(len(tail) * tokens_per_chunk),
            load_s=sum(
                cost.seconds(queued[tier] + wanted[tier] * chunk_nbytes)
                for tier, cost in self.costs.items()
            ),
            recompute_s=len(sources) * self.recompute_s,
            nbytes=sum(wanted.values()) * chunk_nbytes,
            queued_nbytes=sum(queued.values()),
            max_load_s=self.max_load_s,
        )
