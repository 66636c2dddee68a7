"""How much of one wanted prefix is loaded, by what loading and computing are expected to take.

What is kept is the head for which loading minus ``margin`` x computing is least: a head that is
loaded saves its tokens whatever becomes of the tail, a tail without its head saves nothing.
Chunks in RAM cost nothing, but are of use only if everything before them is loaded as well. The
times of several tiers are added although they may overlap: then making any tier slower never
makes more be loaded, which the maximum would not promise. A head ends where a tier would come
near the deadline of its jobs, for what is not there by then was waited for in vain.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvtier.manager.estimates import LoadPrice

__all__ = ["LoadChoice", "SkipCause", "Weighing"]


class SkipCause(enum.Enum):
    """Why what is there is computed."""

    SLOWER = enum.auto()
    """Computing was expected to be faster."""
    LATE = enum.auto()
    """Loading pays, but would not have ended by the deadline."""
    UNPROVEN = enum.auto()
    """A load ran into its deadline, and none has arrived since to say how slow the tier is."""


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """A load that is not done, or not wholly.

    Attributes:
        cause: Why.
        kept: Leading chunks of the request that are loaded.
        tokens_per_chunk: Prompt tokens that each chunk stands for, on average.
        skipped: Chunks of each slower tier that are not, by its index.
        tokens: Prompt tokens of all that was found and is computed instead.
        load_s: What loading all of it would have taken, by the estimate.
        recompute_s: What computing it takes, by the estimate.
        nbytes: Bytes that loading all of it would have moved.
        queued_nbytes: Bytes that were to be moved before them.
        in_time_s: What a load from one tier may take.
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
    in_time_s: float


@dataclass(frozen=True, slots=True)
class Weighing:
    """A prefix that could be loaded, and what is known of the tiers it is in.

    Attributes:
        sources: Index of the tier each chunk would come from; 0 for RAM.
        divisible: Whether a head of it is of use.
        chunk_nbytes: Bytes that move for a chunk.
        chunk_s: What computing a chunk takes.
        gain_s: What loading a chunk may take, if it is to be worth it.
        prices: What loading takes from each slower tier of which that is known.
        outstanding_nbytes: Bytes that are to be moved before, by tier.
        in_time_s: What a load from one tier may take.
        try_chunks: Most chunks that are loaded for the sake of a measurement.
    """

    sources: Sequence[int]
    divisible: bool
    chunk_nbytes: int
    chunk_s: float
    gain_s: float
    prices: Mapping[int, LoadPrice]
    outstanding_nbytes: Sequence[int]
    in_time_s: float
    try_chunks: int

    def best(self) -> int:
        """Return the length of the head whose loading gains most and is done in time."""
        return self._cut(self.prices, self.in_time_s)

    def probed(self, kept: int, bounded: Collection[int]) -> int:
        """Return how much of a head of ``kept`` to load where a price is only a bound.

        Args:
            kept: Chunks of the head.
            bounded: The tiers of which no load has arrived since one was late.
        """
        left = {
            tier: 0 if self.outstanding_nbytes[tier] else self.try_chunks for tier in bounded
        }
        for at, tier in enumerate(self.sources[:kept]):
            if tier in left:
                if not left[tier]:
                    return at
                left[tier] -= 1
        return kept

    def tried(self, kept: int, hoped: Mapping[int, LoadPrice]) -> int:
        """Return ``kept``, or more for the sake of a new measurement.

        Args:
            kept: Chunks of the head that is loaded anyway.
            hoped: What loading may take by now, for estimates that were not renewed.
        """
        length = self._cut(hoped, self.in_time_s)
        known = set(self.sources[:kept]) - {0}
        left = self.try_chunks
        for at in range(kept, length):
            left -= self.sources[at] != 0
            if left < 0 or self.sources[at] in known:
                return at
        return max(length, kept)

    def cause(self, kept: int) -> SkipCause:
        """Say whether a head of ``kept`` would be longer if nothing had to be in time."""
        longer = self._cut(self.prices, math.inf)
        return SkipCause.LATE if longer > kept else SkipCause.SLOWER

    def choice(self, kept: int, tokens_per_chunk: float, cause: SkipCause) -> LoadChoice:
        """Return what follows from loading no more than ``kept``."""
        sources, chunk_nbytes = self.sources, self.chunk_nbytes
        wanted = {tier: sources.count(tier) for tier in sorted(set(sources) - {0})}
        tail = sources[kept:]
        queued = {tier: self.outstanding_nbytes[tier] for tier in wanted}
        return LoadChoice(
            cause=cause,
            kept=kept,
            tokens_per_chunk=tokens_per_chunk,
            skipped={tier: chunks for tier in wanted if (chunks := tail.count(tier))},
            tokens=round(len(tail) * tokens_per_chunk),
            load_s=sum(
                price.seconds(queued[tier] + wanted[tier] * chunk_nbytes)
                for tier, price in self.prices.items()
            ),
            recompute_s=len(sources) * self.chunk_s,
            nbytes=sum(wanted.values()) * chunk_nbytes,
            queued_nbytes=sum(queued.values()),
            in_time_s=self.in_time_s,
        )

    def _cut(self, prices: Mapping[int, LoadPrice], in_time_s: float) -> int:
        """Do :meth:`best` at other prices, or for another deadline."""
        load_s = 0.0
        best, best_s = 0, 0.0
        each_s = {tier: price.s_per_byte * self.chunk_nbytes for tier, price in prices.items()}
        taken_s: dict[int, float] = {}
        for length, tier in enumerate(self.sources, start=1):
            more_s = each_s.get(tier)
            if more_s is not None:
                sofar_s = taken_s.get(tier)
                if sofar_s is None:
                    more_s += prices[tier].seconds(self.outstanding_nbytes[tier])
                    sofar_s = 0.0
                taken_s[tier] = sofar_s = sofar_s + more_s
                if sofar_s > in_time_s:
                    break
                load_s += more_s
            net_s = load_s - length * self.gain_s
            if net_s < best_s and (self.divisible or length == len(self.sources)):
                best, best_s = length, net_s
        return best
