"""Shadow tiers: simulate other eviction policies beside the live tiers.

A shadow is a :class:`~kvtier.policies.simulated_tier.SimulatedTier` with a policy for live
tiers. Unlike a live tier, a shadow moves no bytes, inserts a chunk directly after its miss, and
has no pins. So compare a shadow only with other shadows. For this comparison, each tier also
has a shadow of the tier's live policy.

A large tier is simulated in miniature: a shadow sees only a fixed share of all chunks, chosen
by hash. The shadow's capacity is the same share of the tier's capacity. A chunk is always or
never in the sample. So the sample has the same reuse as the trace, and the hit ratios are
close (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015). This is also
true for policies that are not stack algorithms, and a few thousand sampled chunks suffice
("Cache Modeling and Optimization using Miniature Simulations", USENIX ATC 2017). Sampling
bounds memory and time. A shadow has at most 4,096 chunks. For a chunk outside the sample, only
the first four bytes of the key are read. The sampled prefixes have gaps, so all hits count, not
only leading hits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvtier.keys import ChunkKey
from kvtier.policies.registry import build_eviction
from kvtier.policies.simulated_tier import SimulatedTier

__all__ = ["ShadowTier"]

_MAX_CHUNKS: Final = 4096
_HASH_NBYTES: Final = 4


class ShadowTier:
    """Simulates one tier under several eviction policies, with one shadow for each policy.

    Args:
        capacity: Number of slots of the tier.
        policies: Names of the policies, each once.

    Attributes:
        references: Number of requested chunks in the sample since the start.

    Raises:
        ConfigError: A policy is unknown.
    """

    def __init__(self, capacity: int, policies: Iterable[str]) -> None:
        shift = max((max(capacity, 1) - 1) // _MAX_CHUNKS, 0).bit_length()
        self._mask = (1 << shift) - 1
        self._capacity = max(capacity >> shift, 1)
        self.references = 0
        self._hits = dict.fromkeys(policies, 0)
        self.clear()

    def serve(
        self, chain: Sequence[ChunkKey], now: float, *, request: str = "", session: str = ""
    ) -> None:
        """Simulate one request in every shadow.

        Args:
            chain: The requested chunks, root to leaf.
            now: Seconds on a monotonic clock.
            request: The request's id.
            session: The request's session; an empty string if unknown.
        """
        mask = self._mask
        if mask:
            chain = [
                key for key in chain if not int.from_bytes(key[:_HASH_NBYTES], "big") & mask
            ]
        if not chain:
            return
        self.references += len(chain)
        for policy, tier in self._tiers.items():
            _, hits, _ = tier.serve(chain, now, request=request, session=session)
            self._hits[policy] += hits

    def hits(self) -> dict[str, int]:
        """Return the number of hits among the :attr:`references`, by policy name."""
        return dict(self._hits)

    def clear(self) -> None:
        """Remove every chunk after a reset of the cache, but keep the counts."""
        self._tiers = {
            policy: SimulatedTier(build_eviction(policy, capacity=self._capacity))
            for policy in self._hits
        }
