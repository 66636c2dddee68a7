"""A tier without bytes: an eviction policy and its chunks.

A simulated tier drives a policy in the simulator, in shadow tiers and in the contract tests.
The tier starts empty and all chunks have one size. In *forward* order a request's chunks are
accessed root to leaf: a resident chunk is a hit, and an absent chunk is inserted after an
eviction. In *reverse* order the leading hits are counted first and the chunks are then accessed
leaf to root, so that the root stays longest. One exception: for a ``leaf_only`` policy only the
hits go leaf to root. New chunks go root to leaf, because a parent is inserted before its child.

Creating Python objects dominates the cost, so a new chunk reuses its victim's object, and all
leading hits are recorded in one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.keys import ChunkKey
from kvtier.policies.base import (
    NO_TERMS,
    ChunkCopy,
    CopyState,
    Eviction,
    NoVictimError,
    PolicyContext,
    pick_leaf,
    session_terms,
)

__all__ = ["SimulatedTier"]


class SimulatedTier:
    """An eviction policy and its members.

    Args:
        eviction: The policy, without members. Its capacity is the tier's.
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
        self._is_plain = not (eviction.sheds or eviction.leaf_only or eviction.insert_first)
        self._terms = NO_TERMS
        self._child_counts: dict[ChunkKey, int] = {}

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
            Three counts: leading hits, all hits, and stranded chunks, which are resident behind
            a missing chunk. In reverse order stranded chunks are counted when the request
            arrives; in forward order, when each chunk is accessed.
        """
        ctx = self.ctx
        ctx.now, ctx.request, ctx.session = now, request, session
        self._terms = session_terms(session)
        found = list(map(self.members.get, chain))
        lead = found.index(None) if None in found else len(found)
        behind = len(chain) - lead - found[lead:].count(None)
        if self.eviction.sheds and not self._is_reverse:
            return self._serve_shedding(chain)
        if self._is_reverse and (lead < len(chain) or self.eviction.sheds):
            return lead, self._access_reversed(chain), behind
        leading = [copy for copy in found[:lead] if copy is not None]
        self._use_many(leading[::-1] if self._is_reverse else leading)
        stranded = self._access(chain, range(lead, len(chain)))
        return lead, lead + stranded, stranded

    def use(self, copy: ChunkCopy) -> None:
        """Record a use of a member."""
        copy.hits += 1
        self.eviction.on_hit(copy, self.ctx)
        while self.eviction.surplus and self.evict() is not None:
            pass

    def admit(self, key: ChunkKey, parent: ChunkKey | None = None, depth: int = 0) -> bool:
        """Insert an absent chunk; return False if it cannot become resident.

        Args:
            key: The chunk.
            parent: The preceding chunk; it must be resident if the policy evicts leaves only.
            depth: Number of preceding chunks.
        """
        eviction = self.eviction
        before = self.members.get(parent) if parent is not None else None
        if eviction.leaf_only and parent is not None and before is None:
            return False
        if eviction.tracks_misses:
            eviction.on_miss(key, self.ctx)
        is_full = len(self.members) >= eviction.capacity
        competes = eviction.insert_first and not eviction.leaf_only
        victim = None
        if is_full and not competes:
            victim = self.evict(before)
            if victim is None:
                return False
        copy = self._enter(key, parent, depth, victim)
        eviction.on_insert(copy, self.ctx)
        return not (is_full and competes) or self.evict() is not None

    def evict(self, spared: ChunkCopy | None = None) -> ChunkCopy | None:
        """Remove and return a victim other than ``spared``; None if there is none.

        Raises:
            NoVictimError: The policy picked no copy although every member is evictable.
        """
        victim = self._pick(spared)
        if victim is not None:
            del self.members[victim.key]
            self._count_child(victim.parent, -1)
        return victim

    def _pick(self, spared: ChunkCopy | None) -> ChunkCopy | None:
        if self.eviction.leaf_only:
            return pick_leaf(self.eviction, self.ctx, spared=spared)
        return _require(self.eviction.pick(_any, self.ctx), self.eviction)

    def _enter(
        self, key: ChunkKey, parent: ChunkKey | None, depth: int, reused: ChunkCopy | None
    ) -> ChunkCopy:
        """Make ``key`` a member, reusing the object ``reused`` if there is one."""
        if reused is None or reused.state == CopyState.GONE:
            reused = ChunkCopy(key, 0)
            reused.state = CopyState.RESIDENT
        reused.key, reused.parent, reused.depth, reused.hits = key, parent, depth, 0
        reused.terms = self._terms
        reused.child_count = self._child_counts.get(key, 0)
        self.members[key] = reused
        self._count_child(parent, 1)
        return reused

    def _count_child(self, parent: ChunkKey | None, change: int) -> None:
        """Add ``change`` to the child count of ``parent``, which may be absent."""
        if parent is None or not self.eviction.leaf_only:
            return
        count = self._child_counts.pop(parent, 0) + change
        if count:
            self._child_counts[parent] = count
        if parent in self.members:
            self.members[parent].child_count = count

    def _use_many(self, copies: Sequence[ChunkCopy]) -> None:
        if self.eviction.sheds:
            for copy in copies:
                self.use(copy)
        elif copies:
            for copy in copies:
                copy.hits += 1
            self.eviction.on_hit_many(copies, self.ctx)

    def _serve_shedding(self, chain: Sequence[ChunkKey]) -> tuple[int, int, int]:
        """Access one chunk at a time, because a hit may evict a chunk that comes later."""
        lead = 0
        while lead < len(chain) and self._access(chain, (lead,)):
            lead += 1
        stranded = self._access(chain, range(lead + 1, len(chain)))
        return lead, lead + stranded, stranded

    def _access_reversed(self, chain: Sequence[ChunkKey]) -> int:
        if not self.eviction.leaf_only:
            return self._access(chain, range(len(chain) - 1, -1, -1))
        found = [copy for key in chain if (copy := self.members.get(key)) is not None]
        missing = [depth for depth, key in enumerate(chain) if key not in self.members]
        found.reverse()
        self._use_many(found)
        return len(found) + self._access(
            chain, missing
        )  # a chunk that occurs twice in the prompt hits

    def _access(self, chain: Sequence[ChunkKey], depths: Iterable[int]) -> int:
        """Access the chunks at ``depths``, one by one; return the number of hits."""
        if self._is_plain:
            return self._access_plain(chain, depths)
        hits = 0
        for depth in depths:
            copy = self.members.get(chain[depth])
            if copy is not None:
                hits += 1
                self.use(copy)
            else:
                self.admit(chain[depth], chain[depth - 1] if depth else None, depth)
        return hits

    def _access_plain(self, chain: Sequence[ChunkKey], depths: Iterable[int]) -> int:
        """Do what :meth:`_access` does, with :meth:`use` and :meth:`admit` inlined."""
        members, ctx, eviction, terms = self.members, self.ctx, self.eviction, self._terms
        on_hit, on_insert, pick = eviction.on_hit, eviction.on_insert, eviction.pick
        on_miss = eviction.on_miss if eviction.tracks_misses else None
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
                copy = self._enter(key, None, depth, None)
            else:
                copy = _require(pick(_any, ctx), eviction)
                del members[copy.key]
                copy.key, copy.depth, copy.hits, copy.terms = key, depth, 0, terms
                members[key] = copy
            copy.parent = chain[depth - 1] if depth else None
            on_insert(copy, ctx)
        return hits


def _any(_: ChunkCopy) -> bool:
    return True


def _require(victim: ChunkCopy | None, eviction: Eviction) -> ChunkCopy:
    if type(victim) is not ChunkCopy:
        raise NoVictimError(eviction, victim)
    return victim
