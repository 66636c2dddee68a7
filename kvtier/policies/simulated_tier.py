"""A simulated tier: an eviction policy and its chunks, without bytes.

The simulator and shadow tiers run policies in simulated tiers. A simulated tier starts empty,
and all chunks have one size. In *forward* order a request's chunks are accessed root to leaf: a
resident chunk is a hit, and an absent chunk is inserted after an eviction. In *reverse* order
the leading hits are counted first. Then the chunks are accessed leaf to root, so that the first
chunks of a prefix stay longest.

Creating Python objects would take most of the time. So a new chunk reuses the victim's object,
and one call records all leading hits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.keys import ChunkKey
from kvtier.policies.base import (
    ChunkCopy,
    CopyState,
    Eviction,
    NoVictimError,
    PolicyContext,
    session_terms,
)

__all__ = ["SimulatedTier"]


class SimulatedTier:
    """Simulates one tier with an eviction policy, without bytes.

    Args:
        eviction: The policy, without members. The tier has the policy's capacity.
        touch_order: ``forward`` or ``reverse``; by default the policy's own order.

    Attributes:
        eviction: The policy.
        ctx: The policy's context.
        members: The resident copies by key.
    """

    def __init__(self, eviction: Eviction, *, touch_order: str | None = None) -> None:
        self.eviction = eviction
        self.ctx = PolicyContext()
        self.members: dict[ChunkKey, ChunkCopy] = {}
        self._is_reverse = (touch_order or eviction.touch_order) == "reverse"

    def serve(
        self,
        chain: Sequence[ChunkKey],
        now: float = 0.0,
        *,
        request: str = "",
        session: str = "",
    ) -> tuple[int, int, int]:
        """Access the chunks of one request.

        Args:
            chain: The chunks, root to leaf.
            now: Seconds on a monotonic clock.
            request: The request's id.
            session: The request's session; an empty string if unknown.

        Returns:
            The number of leading hits, the number of all hits, and the number of stranded
            chunks. A stranded chunk is resident behind a missing chunk. In reverse order,
            stranded chunks are counted when the request arrives. In forward order, a stranded
            chunk is counted when it is accessed.

        Raises:
            NoVictimError: The policy picked no victim, although every member is evictable.
        """
        ctx = self.ctx
        ctx.now, ctx.request, ctx.session = now, request, session
        found = list(map(self.members.get, chain))
        lead = found.index(None) if None in found else len(found)
        behind = len(chain) - lead - found[lead:].count(None)
        if self._is_reverse and lead < len(chain):
            return lead, self._access(chain, range(len(chain) - 1, -1, -1)), behind
        leading = [copy for copy in found[:lead] if copy is not None]
        if leading:
            for copy in leading:
                copy.hits += 1
            if self._is_reverse:
                self.eviction.on_hit_many(leading[::-1], ctx)
            else:  # a batch would be taken for one from leaf to root
                for copy in leading:
                    self.eviction.on_hit(copy, ctx)
        stranded = self._access(chain, range(lead, len(chain)))
        return lead, lead + stranded, stranded

    def _access(self, chain: Sequence[ChunkKey], depths: Iterable[int]) -> int:
        """Access the chunks at ``depths``, one by one; return the number of hits."""
        members, ctx, eviction = self.members, self.ctx, self.eviction
        on_hit, on_insert, pick = eviction.on_hit, eviction.on_insert, eviction.pick
        on_miss = eviction.on_miss if eviction.tracks_misses else None
        terms = session_terms(ctx.session)
        room, hits = eviction.capacity - len(members), 0
        for depth in depths:
            key = chain[depth]
            copy = members.get(key)
            if copy is not None:
                hits += 1
                copy.hits += 1
                on_hit(copy, ctx)
                continue
            if on_miss is not None:
                on_miss(key, ctx)
            if room > 0:
                room -= 1
                copy = ChunkCopy(key, 0)
                copy.state = CopyState.RESIDENT
            else:
                copy = pick(_any, ctx)
                if type(copy) is not ChunkCopy:
                    raise NoVictimError(eviction, copy)
                del members[copy.key]
                copy.key, copy.hits = key, 0
            members[key] = copy
            copy.parent = chain[depth - 1] if depth else None
            copy.depth, copy.terms = depth, terms
            on_insert(copy, ctx)
        return hits


def _any(_: ChunkCopy) -> bool:
    return True
