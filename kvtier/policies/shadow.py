"""Shadow tiers: simulate other eviction policies beside the live tiers.

A shadow is a :class:`~kvtier.policies.simulated_tier.SimulatedTier` with a policy class for
live tiers. A shadow moves no bytes, inserts a chunk directly after its miss and has no pins. So
compare a shadow only with other shadows. For this purpose each tier also has a shadow of its
live policy.

A large tier is simulated in miniature: a shadow sees only the chunks whose hash falls into a
fixed share of all hashes, and its capacity is the same share of the tier's capacity. A chunk is
always or never in the sample. So the sample has the same reuse as the trace, and the hit ratios
are close (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015; for policies
that are not stack algorithms, "Cache Modeling and Optimization using Miniature Simulations",
USENIX ATC 2017, which finds that a few thousand sampled chunks suffice). Sampling bounds memory
and time: a shadow has at most 4,096 chunks, and for a chunk outside the sample only the first
four bytes of its key are read. The sampled prefixes have gaps, so all hits count, not only
leading hits.
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
    """The shadows of one tier, one for each policy.

    Args:
        capacity: Slots of the tier.
        policies: Names of the policies, each once.

    Attributes:
        references: Number of requested chunks that were in the sample, since the start.

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
        """Forget every chunk after a reset of the cache; keep the counts."""
        self._tiers = {
            policy: SimulatedTier(build_eviction(policy, capacity=self._capacity))
            for policy in self._hits
        }
