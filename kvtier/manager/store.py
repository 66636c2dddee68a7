"""Stores new chunks into RAM.

A plan of a store allocates the slots and adds the chunks as *writing*, before any byte moves. A
chunk becomes a hit once every rank has recorded that the rank's part is whole. The engine
offers a request's chunks at every step until a store is accepted. If an accepted store leaves
out chunks, the engine never offers them again. So if slots are too few, a store is first
refused a few times, and only then cut to the chunks that fit. The last offer of a request is
cut at once.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, compress, count
from typing import Final, NamedTuple

from kvtier.keys import ChunkKey, group_part, is_single_group
from kvtier.manager.copies import CopyList, nearest_to_root
from kvtier.manager.demote import Demoter
from kvtier.manager.grants import Grants, RequestState
from kvtier.manager.tier_stack import NO_GENERATION, TierStack
from kvtier.policies import ChunkCopy, CopyState
from kvtier.policies.base import NO_TERMS

__all__ = ["NOTHING_TO_STORE", "StorePlan", "Storer"]

_RESIDENT = CopyState.RESIDENT
_WRITING = CopyState.WRITING
_slot_of = operator.attrgetter("slot")
_NO_TAIL: tuple[ChunkKey | None, int] = (None, -1)


class StorePlan(NamedTuple):
    """The RAM slots for new chunks of a request.

    Attributes:
        keys: The chunks to store, in the order of the offer.
        slots: RAM slot of each chunk.
        generation: Generation of all slots. A worker records it for each slot whose bytes are
            whole.
        evicted: Keys evicted from RAM. Announce the evictions before the stores.
    """

    keys: Sequence[ChunkKey]
    slots: Sequence[int]
    generation: int
    evicted: Sequence[ChunkKey]


NOTHING_TO_STORE: Final = StorePlan((), (), NO_GENERATION, ())


class _Write(NamedTuple):
    """A store in flight: the id of its request, and its copies."""

    req_id: str
    listed: CopyList


class Storer:
    """Plans stores into RAM and completes them."""

    def __init__(self, stack: TierStack, grants: Grants, demoter: Demoter) -> None:
        self._stack = stack
        self._ram = stack.ram
        self._grants = grants
        self._demoter = demoter
        self._writes: dict[int, _Write] = {}  # in flight, by generation

    def __bool__(self) -> bool:
        return bool(self._writes)

    def prepare(
        self, keys: Sequence[ChunkKey], request: RequestState | None, *, is_last: bool
    ) -> StorePlan | None:
        """Plan a store into RAM; see :meth:`TieredOffloadingManager.prepare_store`."""
        if not keys:
            return NOTHING_TO_STORE
        if is_last and request is not None:
            request.refusals = self._stack.limits.max_store_refusals
        if not self._stack.has_any(keys):
            plan = self._store(keys, keys, request)
            if plan is not None and request is not None and not request.has_gap:
                request.has_gap = any(map(self._stack.is_counted, keys))
            return plan
        members = self._ram.copies
        new = [key for key in keys if key not in members]
        if not new:
            self._offer_again(keys, request)
            return NOTHING_TO_STORE
        stranded = self._count_stranded(keys, request)
        offered = [copy for key in keys if (copy := members.get(key)) is not None]
        self._ram.pin(offered)  # so that no prefix is evicted for its own tail
        try:
            plan = self._store(new, keys, request)
        finally:
            self._ram.unpin(offered)
        if plan is not None:  # else all are offered again
            self._record_stranded(stranded, request)
            if plan is not NOTHING_TO_STORE:
                self._touch(keys)
        return plan

    def complete(self, keys: Collection[ChunkKey]) -> None:
        """Complete a store of ``keys``; see :meth:`TieredOffloadingManager.complete_store`."""
        first = self._ram.copies.get(next(iter(keys), b""))
        write = None if first is None else self._writes.get(first.generation)
        if first is not None and write is not None and self._is_whole_store(write.listed, keys):
            del self._writes[first.generation]
            with self._stack.naming_request(write.req_id, first.terms):
                self._publish(write.listed, [first.generation] * len(write.listed.copies))
            return
        listed = self._listed(keys)
        generations = [copy.generation for copy in listed.copies]
        for generation in {*generations}:
            self._end_writes(generation, listed)
        self._publish(listed, generations)

    def _publish(self, listed: CopyList, generations: Sequence[int]) -> None:
        """Make the chunks of ended stores hits; drop chunks with incomplete bytes."""
        stored = self._stack.slot_status.stored(listed.slots, generations)
        if not all(stored):
            copies = listed.copies
            self._abort([copy for copy, ok in zip(copies, stored, strict=True) if not ok])
            listed = self._ram.list_of(list(compress(copies, stored)))
        self._demoter.publish(listed)
        self._grants.record_arrived(listed.copies)

    def clear(self) -> list[ChunkCopy]:
        """Forget the stores in flight, after a reset of the cache.

        Returns:
            The copies that workers may be writing; each still has its writer's pin.
        """
        writes, self._writes = self._writes, {}
        copies = chain.from_iterable(write.listed.copies for write in writes.values())
        return list(filter(_is_being_stored, copies))

    def _offer_again(self, keys: Sequence[ChunkKey], request: RequestState | None) -> None:
        """Record that an engine offered ``keys``, which are all in RAM."""
        if request is not None:
            if request.has_gap:
                self._record_stranded(self._count_stranded(keys, request), request)
            request.extend([self._ram.copies[key] for key in keys])
        self._touch(keys)

    def _count_stranded(
        self, keys: Sequence[ChunkKey], request: RequestState | None
    ) -> tuple[Sequence[int], bool]:
        """Count resident chunks that the engine computed because an earlier chunk is missing.

        *Stranded* chunks are in a tier, but behind a chunk that is in no tier. The simulator
        reports the same number as ``hits - lead_chunks``. Only keys of the counting group are
        counted, because a sliding window may have gaps.

        Returns:
            The count of each tier, and whether chunks after ``keys`` would be stranded too.
        """
        tiers = self._stack.tiers
        counts = [0] * len(tiers)
        has_gap = request is not None and request.has_gap
        for key in filter(self._stack.is_counted, keys):
            for tier in tiers:
                copy = tier.copies.get(key)
                if copy is not None:
                    counts[tier.index] += has_gap and copy.state == _RESIDENT
                    break
            else:
                has_gap = True
        return counts, has_gap

    def _record_stranded(
        self, stranded: tuple[Sequence[int], bool], request: RequestState | None
    ) -> None:
        counts, has_gap = stranded
        for tier, chunks in zip(self._stack.tiers, counts, strict=True):
            tier.counters.stranded += chunks
        if request is not None:
            request.has_gap = has_gap

    def _is_whole_store(self, listed: CopyList, keys: Collection[ChunkKey]) -> bool:
        """Return whether ``listed``, made when the store was planned, still matches ``keys``.

        The list matches if its keys are ``keys`` and RAM has dropped no chunk since the plan.
        """
        if listed.drops != self._ram.drops or len(keys) != len(listed.keys):
            return False
        if isinstance(keys, (set, frozenset)):  # an engine may pass a set
            return keys.issuperset(listed.keys)
        return keys == listed.keys

    def _listed(self, keys: Collection[ChunkKey]) -> CopyList:
        """Return the copies of ``keys`` that are being stored, sorted by slot."""
        copies = [copy for copy in map(self._ram.copies.get, keys) if copy is not None]
        written = list(filter(_is_being_stored, copies))
        written.sort(key=_slot_of)  # ascending along the prefix, in whatever order a set is
        return self._ram.list_of(written)

    def _end_writes(self, generation: int, ended: CopyList) -> None:
        """Remove the copies in ``ended`` from a store in flight."""
        write = self._writes.pop(generation, None)
        if write is None:
            return
        are_ended = set(ended.copies)
        rest = [copy for copy in write.listed.copies if copy not in are_ended]
        if rest:
            self._writes[generation] = _Write(write.req_id, write.listed.part(rest))

    def _abort(self, copies: Sequence[ChunkCopy]) -> None:
        """Drop chunks with incomplete bytes."""
        for copy in copies:
            self._ram.counters.failed += 1
            self._grants.record_missing(copy)
            self._ram.abort(copy)

    def _store(
        self, new: Sequence[ChunkKey], offered: Sequence[ChunkKey], request: RequestState | None
    ) -> StorePlan | None:
        """Plan a store of ``new``, the ``offered`` keys that RAM lacks; None to postpone it."""
        stack, ram = self._stack, self._ram
        fits = self._fitting(len(new), request)
        if fits is None:
            return None
        for gaps in stack.gaps:  # the engine computed these chunks, so a request needed them
            if wanted := gaps.recently_evicted(new):
                stack.record_wanted(wanted)
        head = new
        if fits < len(new):
            head = [new[at] for at in nearest_to_root(new, fits)]
            self._count_refused(len(new) - fits)
        if not head:
            return NOTHING_TO_STORE
        slots, evicted = stack.take_slots(ram, head)
        stack.slot_status.clear_generations(slots)
        generation = stack.next_generation()
        parents, depths = _places(head, offered, {} if request is None else request.tails)
        terms = NO_TERMS if request is None else request.terms
        copies = ram.begin_writing(head, slots, parents, depths, generation, terms)
        listed = CopyList(copies, head, slots, ram.drops)
        self._writes[generation] = _Write(stack.ctx.request, listed)
        stack.slot_status.issue(slots)
        return StorePlan(head, slots, generation, evicted)

    def _fitting(self, chunks: int, request: RequestState | None) -> int | None:
        """Return how many of ``chunks`` new chunks to store now; None to postpone the store.

        If too few slots are available, this method also asks for more slots.
        """
        available = self._ram.available
        if chunks <= available:
            if request is not None:
                request.refusals = 0
            return chunks
        self._ram.request_slots(chunks)
        limit = self._stack.limits.max_store_refusals
        never_fits = chunks > self._ram.slots.capacity
        if request is None or never_fits or request.refusals >= limit:
            self._stack.retention.release_early(chunks - available)
            return min(chunks, self._ram.available)
        request.refusals += 1
        return None

    def _count_refused(self, chunks: int) -> None:
        """Count ``chunks`` chunks as refused.

        The same number counts as dropped, or the number of dirty copies if that is smaller.
        """
        ram = self._ram
        ram.counters.refused += chunks
        ram.counters.dropped += min(chunks, ram.dirty)

    def _touch(self, keys: Sequence[ChunkKey]) -> None:
        """Record a use of ``keys``, which an engine offered, in every tier that has copies."""
        for tier in self._stack.tiers:
            copies = tier.resident(keys)
            if copies:
                tier.touch(copies, self._stack.ctx)


def _is_being_stored(copy: ChunkCopy) -> bool:
    """Return whether a worker is storing this RAM copy. Promotions do not count."""
    return copy.state == _WRITING and not copy.origin


def _places(
    new: Sequence[ChunkKey],
    offered: Sequence[ChunkKey],
    tails: dict[bytes, tuple[ChunkKey, int]],
) -> tuple[Iterable[ChunkKey | None], Iterable[int]]:
    """Return the parents and the depths of the chunks in ``new``.

    Args:
        new: Chunks to store, group by group, root to leaf.
        offered: All offered chunks, ``new`` included.
        tails: For each group, the last earlier chunk and the depth of this chunk. This function
            updates them.
    """
    group = group_part(offered[0])
    if len(new) == len(offered) and is_single_group(new):
        parent, depth = tails.get(group, _NO_TAIL)
        tails[group] = (new[-1], depth + len(new))
        return chain((parent,), new), count(depth + 1)
    parents: list[ChunkKey | None] = []
    depths: list[int] = []
    remaining = iter(new)
    expected = next(remaining, None)
    group, parent, depth = b"\0", None, -1
    tail = _NO_TAIL
    for key in offered:
        if parent is None or not key.endswith(group):
            if parent is not None:
                tails[group] = (parent, depth)
            group = group_part(key)
            parent, depth = tail = tails.get(group, _NO_TAIL)
        depth = tail[1] if key == tail[0] else depth + 1
        if key is expected:
            parents.append(parent)
            depths.append(depth)
            expected = next(remaining, None)
        parent = key
    if parent is not None:
        tails[group] = (parent, depth)
    return parents, depths
