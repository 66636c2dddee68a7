"""The loops that put a request's chunks to an eviction policy, for one tier.

A Python loop that makes an object per miss spends most of its time doing so. Here the victim's
object becomes the newcomer: a policy keeps no reference to a copy it picked. Residency is a
list indexed by chunk number, and a run of hits is one call. Policies that ask for more than
the five plain calls are driven in smaller steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvtier.keys import GROUP_NBYTES, ChunkKey
from kvtier.policies import NEVER, ChunkCopy, CopyState, Eviction, PolicyContext
from kvtier.policies.base import NoVictimError
from kvtier.policies.leaves import pick_leaf
from kvtier.policies.terms import NO_TERMS, session_terms
from kvtier.sim.traces import Trace

__all__ = ["Tier", "chunk_keys", "tier_for"]


def chunk_keys(distinct: int) -> list[ChunkKey]:
    """Return a key for every chunk number: one object each, so that its hash is cached."""
    keys = np.zeros((distinct, 8 + GROUP_NBYTES), dtype=np.uint8)
    keys[:, :8] = np.arange(distinct, dtype=">u8").view(np.uint8).reshape(distinct, 8)
    chunks: list[ChunkKey] = keys.view(f"V{keys.shape[1]}").ravel().tolist()
    return chunks


def tier_for(eviction: Eviction, trace: Trace, order: str) -> Tier:
    """Return the loop that ``eviction`` needs.

    Args:
        eviction: The policy, empty.
        trace: What will be replayed.
        order: ``forward`` or ``reverse``.
    """
    if eviction.needs_future:
        return _TierWithFuture(eviction, trace, order)
    if eviction.sheds:
        return _SheddingTier(eviction, trace, order)
    if eviction.leaf_only:
        return _TierWithKids(eviction, trace, order)
    if eviction.insert_first:
        return _TierOfRivals(eviction, trace, order)
    return Tier(eviction, trace, order)


def _always(_: ChunkCopy) -> bool:
    return True


class Tier:
    """A tier of nothing but an eviction policy and who is resident.

    Attributes:
        ctx: What the policy is told besides the copy.
    """

    def __init__(self, eviction: Eviction, trace: Trace, order: str) -> None:
        self.ctx = PolicyContext()
        self._eviction = eviction
        self._terms = NO_TERMS
        self._reverse = order == "reverse"
        self._room = eviction.capacity
        self._here: list[ChunkCopy | None] = [None] * trace.distinct
        self._keys = chunk_keys(trace.distinct)

    def turn_to(self, request: str, session: str, now: float) -> None:
        """Tell the policy whose chunks the next uses and insertions are, as a manager does."""
        ctx = self.ctx
        ctx.now = now
        ctx.request = request
        ctx.session = session
        self._terms = session_terms(session)

    def serve(self, chain: Sequence[int]) -> tuple[int, int, int]:
        """Access a request's chunks.

        Args:
            chain: Chunk numbers, root to leaf.

        Returns:
            How many leading chunks were resident at arrival, how many accesses hit, and how
            many chunks were resident behind one that was not: in reverse at arrival, and
            forward when their turn came.
        """
        here = self._here
        found: list[ChunkCopy] = []
        for number in chain:
            copy = here[number]
            if copy is None:
                break
            found.append(copy)
        lead = len(found)
        if self._reverse and lead < len(chain):
            behind = self._resident(chain[lead:])
            return lead, self._access_in_reverse(chain), behind
        if self._reverse:
            found.reverse()
        if lead:
            self._touch(found)
        behind = self._access(chain, range(lead, len(chain)))
        return lead, lead + behind, behind

    def _resident(self, chain: Sequence[int]) -> int:
        here = self._here
        return len(chain) - [here[number] for number in chain].count(None)

    def _access_in_reverse(self, chain: Sequence[int]) -> int:
        return self._access(chain, range(len(chain) - 1, -1, -1))

    def _touch(self, copies: Sequence[ChunkCopy]) -> None:
        for copy in copies:
            copy.hits += 1
        self._eviction.on_hit_many(copies, self.ctx)

    def _access(self, chain: Sequence[int], places: Iterable[int]) -> int:
        """Access the chunks at ``places`` of ``chain``, one by one; return the hits."""
        here, keys, ctx, eviction = self._here, self._keys, self.ctx, self._eviction
        on_hit, on_insert, pick = eviction.on_hit, eviction.on_insert, eviction.pick
        on_miss = eviction.on_miss if eviction.tracks_misses else None
        hits = 0
        for depth in places:
            number = chain[depth]
            copy = here[number]
            if copy is not None:
                hits += 1
                copy.hits += 1
                on_hit(copy, ctx)
                continue
            key = keys[number]
            if on_miss is not None:
                on_miss(key, ctx)
            if self._room:
                self._room -= 1
                copy = ChunkCopy(key, number)
                copy.state = CopyState.RESIDENT
            else:
                copy = _picked(pick(_always, ctx), eviction)
                here[copy.slot] = None
                copy.key = key
                copy.slot = number
                copy.hits = 0
            copy.depth = depth
            copy.parent = keys[chain[depth - 1]] if depth else None
            copy.terms = self._terms
            here[number] = copy
            on_insert(copy, ctx)
        return hits


def _picked(copy: ChunkCopy | None, eviction: Eviction) -> ChunkCopy:
    if copy is None:
        raise NoVictimError(eviction)
    return copy


class _CarefulTier(Tier):
    """The same in small steps, for policies that are told or asked more than most."""

    def _access(self, chain: Sequence[int], places: Iterable[int]) -> int:
        hits = 0
        for depth in places:
            copy = self._here[chain[depth]]
            if copy is not None:
                hits += 1
                self._touch((copy,))
                continue
            key = self._keys[chain[depth]]
            if self._eviction.tracks_misses:
                self._eviction.on_miss(key, self.ctx)
            copy = self._take(chain[depth])
            copy.depth = depth
            copy.parent = self._keys[chain[depth - 1]] if depth else None
            copy.terms = self._terms
            self._insert(copy)
        return hits

    def _take(self, number: int) -> ChunkCopy:
        """Return a copy to insert, for which there is room."""
        if self._room:
            self._room -= 1
            copy = ChunkCopy(self._keys[number], number)
            copy.state = CopyState.RESIDENT
            return copy
        copy = self._evict()
        copy.key = self._keys[number]
        copy.slot = number
        copy.hits = 0
        return copy

    def _insert(self, copy: ChunkCopy) -> None:
        self._here[copy.slot] = copy
        self._eviction.on_insert(copy, self.ctx)

    def _evict(self) -> ChunkCopy:
        victim = _picked(self._eviction.pick(_always, self.ctx), self._eviction)
        self._here[victim.slot] = None
        return victim


class _TierOfRivals(_CarefulTier):
    """For policies whose newcomer competes: it is inserted first and may be the victim."""

    def _take(self, number: int) -> ChunkCopy:
        copy = ChunkCopy(self._keys[number], number)
        copy.state = CopyState.RESIDENT
        return copy

    def _insert(self, copy: ChunkCopy) -> None:
        super()._insert(copy)
        if self._room:
            self._room -= 1
        else:
            self._evict()


class _SheddingTier(_CarefulTier):
    """For policies that evict on a hit as well: a chunk may be gone when its turn comes."""

    def serve(self, chain: Sequence[int]) -> tuple[int, int, int]:
        lead = 0
        if self._reverse:
            while lead < len(chain) and self._here[chain[lead]] is not None:
                lead += 1
            behind = self._resident(chain[lead:])
            return lead, self._access_in_reverse(chain), behind
        for depth, number in enumerate(chain):
            if self._here[number] is None:
                behind = self._access(chain, range(depth, len(chain)))
                return lead, lead + behind, behind
            lead += self._access(chain, (depth,))
        return lead, lead, 0

    def _touch(self, copies: Sequence[ChunkCopy]) -> None:
        for copy in copies:
            copy.hits += 1
            self._eviction.on_hit(copy, self.ctx)
            while self._eviction.surplus:
                self._evict()
                self._room += 1


class _TierWithKids(Tier):
    """For policies that evict leaves only: counts every chunk's resident children.

    No chunk is let in behind one that is not here, and none pushes out the one before it, as a
    live tier pins the prefix that is offered along. So of a chain longer than the tier the head
    that fits comes in, and the rest stays out.
    """

    def __init__(self, eviction: Eviction, trace: Trace, order: str) -> None:
        super().__init__(eviction, trace, order)
        self._kids = [0] * trace.distinct
        self._parents = [-1] * trace.distinct

    def _access_in_reverse(self, chain: Sequence[int]) -> int:
        here = self._here
        found = [copy for number in chain if (copy := here[number]) is not None]
        missing = [depth for depth, number in enumerate(chain) if here[number] is None]
        found.reverse()
        self._touch(found)
        # A chunk named twice is a hit the second time.
        return len(found) + self._access(chain, missing)

    def _access(self, chain: Sequence[int], places: Iterable[int]) -> int:
        here, keys, ctx, eviction = self._here, self._keys, self.ctx, self._eviction
        on_insert, parents = eviction.on_insert, self._parents
        hits = 0
        for depth in places:
            number = chain[depth]
            copy = here[number]
            if copy is not None:
                hits += 1
                self._touch((copy,))
                continue
            before = here[chain[depth - 1]] if depth else None
            if depth and before is None:
                continue
            if eviction.tracks_misses:
                eviction.on_miss(keys[number], ctx)
            copy = self._take(number, before)
            if copy is None:
                continue
            parents[number] = before.slot if before is not None else -1
            copy.depth = depth
            copy.parent = before.key if before is not None else None
            copy.terms = self._terms
            copy.child_count = self._kids[number]
            here[number] = copy
            self._count_kid(parents[number], 1)
            on_insert(copy, ctx)
        return hits

    def _take(self, number: int, before: ChunkCopy | None) -> ChunkCopy | None:
        """Return a copy for chunk ``number``, which comes after ``before``.

        None when all that could go are the chunks before it.
        """
        if self._room:
            self._room -= 1
            copy = ChunkCopy(self._keys[number], number)
            copy.state = CopyState.RESIDENT
            return copy
        victim = pick_leaf(self._eviction, self.ctx, but=before)
        if victim is not None:
            self._here[victim.slot] = None
            self._count_kid(self._parents[victim.slot], -1)
            victim.key = self._keys[number]
            victim.slot = number
            victim.hits = 0
        return victim

    def _count_kid(self, parent: int, change: int) -> None:
        if parent < 0:
            return
        self._kids[parent] += change
        copy = self._here[parent]
        if copy is not None:
            copy.child_count += change


class _TierWithFuture(_CarefulTier):
    """For policies that must know when a chunk is wanted next."""

    def __init__(self, eviction: Eviction, trace: Trace, order: str) -> None:
        super().__init__(eviction, trace, order)
        following = trace.next_uses(backwards=self._reverse)
        self._following = iter(NEVER if at == trace.refs else at for at in following.tolist())

    def _touch(self, copies: Sequence[ChunkCopy]) -> None:
        for copy in copies:
            copy.hits += 1
            self.ctx.next_use = next(self._following)
            self._eviction.on_hit(copy, self.ctx)

    def _insert(self, copy: ChunkCopy) -> None:
        self.ctx.next_use = next(self._following)
        super()._insert(copy)
