"""Takes new chunks into RAM.

A store is planned before a byte moves: room is made, slots are given and the chunk is written
into the books as *writing*. It becomes a hit only when the workers' own record says that
every rank's bytes are whole. The engine offers a request's chunks again at every step until
they are taken, so a store that finds no room is put off a few times; after that the head that
fits is taken, because the engine forgets what it was refused.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, compress, count

from kvtier.keys import GROUP_NBYTES, ChunkKey, of_one_group
from kvtier.manager.demoter import Demoter
from kvtier.manager.grants import Grants
from kvtier.manager.ladder import Ladder
from kvtier.manager.order import nearest
from kvtier.manager.plans import NOTHING_TO_STORE, StorePlan
from kvtier.manager.requests import RequestState
from kvtier.manager.run import Run
from kvtier.policies import ChunkCopy, CopyState
from kvtier.policies.terms import NO_TERMS

__all__ = ["Storer"]

_RESIDENT = CopyState.RESIDENT
_WRITING = CopyState.WRITING
_slot_of = operator.attrgetter("slot")
_ROOT: tuple[ChunkKey | None, int] = (None, -1)


class Storer:
    """Plans stores into RAM and completes them."""

    def __init__(self, ladder: Ladder, grants: Grants, demoter: Demoter) -> None:
        self._ladder = ladder
        self._ram = ladder.ram
        self._grants = grants
        self._demoter = demoter
        self._writes: dict[int, Run] = {}  # in flight, by generation

    def prepare(
        self, keys: Sequence[ChunkKey], request: RequestState | None
    ) -> StorePlan | None:
        """Do :meth:`TieredOffloadingManager.prepare_store`."""
        members = self._ram.copies
        if not keys:
            return NOTHING_TO_STORE
        if not self._ladder.holds_any(keys):
            plan = self._store_new(keys, keys, request)
            if plan is not None and request is not None and not request.broken:
                request.broken = any(map(self._ladder.is_counted, keys))
            return plan
        new = [key for key in keys if key not in members]
        if not new:
            self._pass_over(keys, request)
            return NOTHING_TO_STORE
        stranded = self._stranded(keys, request)
        plan = self._store_rest(new, keys, request)
        if plan is not None:  # else all are offered again
            self._count_stranded(stranded, request)
            if plan is not NOTHING_TO_STORE:
                self._touch_offered(keys)
        return plan

    def _pass_over(self, keys: Sequence[ChunkKey], request: RequestState | None) -> None:
        """Note that ``keys`` were offered and are all in RAM."""
        if request is not None:
            if request.broken:
                self._count_stranded(self._stranded(keys, request), request)
            request.remember([self._ram.copies[key] for key in keys])
        self._touch_offered(keys)

    def _store_rest(
        self, new: Sequence[ChunkKey], keys: Sequence[ChunkKey], request: RequestState | None
    ) -> StorePlan | None:
        """Take ``new`` without making victims of the others that are offered along."""
        # The prefix that is offered along is no victim for its own tail.
        members = self._ram.copies
        there = [copy for key in keys if (copy := members.get(key)) is not None]
        self._ram.pin_many(there)
        plan = self._store_new(new, keys, request)
        self._ram.unpin_many(there)
        return plan

    def _stranded(
        self, keys: Sequence[ChunkKey], request: RequestState | None
    ) -> tuple[Sequence[int], bool]:
        """Find those of ``keys`` that are in a tier behind one that is in no tier.

        They were computed although their bytes are here: ``hits - lead_chunks`` of a simulated
        tier. Of the counting group only, for a sliding window may have gaps.

        Returns:
            How many there are in each tier, and whether what follows ``keys`` is stranded too.
        """
        tiers = self._ladder.tiers
        counts = [0] * len(tiers)
        broken = request is not None and request.broken
        for key in filter(self._ladder.is_counted, keys):
            for tier in tiers:
                copy = tier.copies.get(key)
                if copy is not None:
                    counts[tier.index] += broken and copy.state == _RESIDENT
                    break
            else:
                broken = True
        return counts, broken

    def _count_stranded(
        self, found: tuple[Sequence[int], bool], request: RequestState | None
    ) -> None:
        counts, broken = found
        for tier, chunks in zip(self._ladder.tiers, counts, strict=True):
            tier.counters.stranded += chunks
        if request is not None:
            request.broken = broken

    def complete(self, keys: Collection[ChunkKey]) -> None:
        """Do :meth:`TieredOffloadingManager.complete_store`."""
        first = self._ram.copies.get(next(iter(keys), b""))
        run = None if first is None else self._writes.pop(first.generation, None)
        if first is None or run is None or not self._is_all_of(run, keys):
            run = self._run_of(keys)
            generations = [copy.generation for copy in run.copies]
            for generation in {*generations}:
                self._writes.pop(generation, None)
        else:
            generations = [first.generation] * len(run.copies)
        whole = self._ladder.slot_status.stored(run.slots, generations)
        if not all(whole):
            copies = run.copies
            self._give_up([copy for copy, ok in zip(copies, whole, strict=True) if not ok])
            run = self._ram.run_of(list(compress(copies, whole)))
        self._demoter.publish(run)
        self._grants.settle_arrived(run.copies)

    def clear(self) -> None:
        """Forget what is being stored; for a reset of the cache, after which none completes."""
        self._writes.clear()

    def _is_all_of(self, run: Run, keys: Collection[ChunkKey]) -> bool:
        """Return whether ``keys`` are all of a store, which is as it was planned."""
        if run.departed != self._ram.departed or len(keys) != len(run.keys):
            return False
        if isinstance(keys, (set, frozenset)):  # an engine may hand them over as one
            return keys.issuperset(run.keys)
        return keys == run.keys

    def _run_of(self, keys: Collection[ChunkKey]) -> Run:
        """Return those of ``keys`` that are being stored, by slot."""
        written = [
            copy
            for copy in map(self._ram.copies.get, keys)
            if copy is not None and copy.state == _WRITING and not copy.origin
        ]
        written.sort(key=_slot_of)  # ascending along the prefix, whatever order a set has
        return self._ram.run_of(written)

    def _give_up(self, copies: Sequence[ChunkCopy]) -> None:
        """Take back what did not arrive whole."""
        for copy in copies:
            self._ram.counters.failed += 1
            self._grants.settle_missing(copy)
            self._ram.abort(copy)

    def _store_new(
        self, new: Sequence[ChunkKey], keys: Sequence[ChunkKey], request: RequestState | None
    ) -> StorePlan | None:
        ram = self._ram
        fits = self._room_for(len(new), request)
        if fits is None:
            return None
        self._note_wanted(new)
        head = new if fits == len(new) else [new[at] for at in nearest(new, fits)]
        room = self._ladder.make_room(ram, head) if head else None
        if room is None:
            self._refuse(len(new))
            return NOTHING_TO_STORE
        slots, evicted = room
        self._refuse(len(new) - fits)
        new = head
        self._ladder.slot_status.withdraw(slots)
        generation = self._ladder.next_generation()
        parents, depths = _places(new, keys, {} if request is None else request.tails)
        terms = NO_TERMS if request is None else request.terms
        copies = ram.begin_writing(new, slots, parents, depths, generation, terms)
        self._writes[generation] = Run(copies, new, slots, ram.departed)
        self._ladder.slot_status.issue(slots)
        return StorePlan(new, slots, generation, evicted)

    def _note_wanted(self, new: Sequence[ChunkKey]) -> None:
        """Note that chunks which are not in RAM were wanted: somebody computed them."""
        for gaps in self._ladder.gaps:
            self._ladder.asked(gaps.remembered(new))

    def _refuse(self, chunks: int) -> None:
        """Count new chunks that find no room, and those that dirty ones kept from it."""
        ram = self._ram
        ram.counters.refused += chunks
        ram.counters.dropped += min(chunks, ram.dirty)

    def _room_for(self, chunks: int, request: RequestState | None) -> int | None:
        """Return how many of ``chunks`` new chunks to take, or None to be asked again."""
        room = self._ram.room
        if chunks <= room:
            if request is not None:
                request.refusals = 0
            return chunks
        self._ram.want(chunks)
        patience = self._ladder.limits.max_store_refusals
        hopeless = chunks > self._ram.slots.capacity
        if request is None or hopeless or request.refusals >= patience:
            self._ladder.retention.give_way(chunks - room)
            return min(chunks, self._ram.room)
        request.refusals += 1
        return None

    def _touch_offered(self, keys: Sequence[ChunkKey]) -> None:
        """Count being offered again as a use, in every tier that holds the chunk."""
        for tier in self._ladder.tiers:
            members = tier.copies
            there = [
                copy
                for key in keys
                if (copy := members.get(key)) is not None and copy.state == _RESIDENT
            ]
            if there:
                tier.touch(there, self._ladder.ctx)


def _places(
    new: Sequence[ChunkKey],
    offered: Sequence[ChunkKey],
    tails: dict[bytes, tuple[ChunkKey, int]],
) -> tuple[Iterable[ChunkKey | None], Iterable[int]]:
    """Return the chunk before each of ``new`` in its group, and its depth.

    Args:
        new: Chunks to store, those of each group root to leaf.
        offered: The chunks they were chosen from.
        tails: The last chunk of each group so far, and its depth; brought up to date.
    """
    group = offered[0][-GROUP_NBYTES:]
    if len(new) == len(offered) and of_one_group(new):
        parent, depth = tails.get(group, _ROOT)
        tails[group] = (new[-1], depth + len(new))
        return chain((parent,), new), count(depth + 1)
    parents: list[ChunkKey | None] = []
    depths: list[int] = []
    wanted = iter(new)
    expected = next(wanted, None)
    group, parent, depth = b"\0", None, -1
    tail = _ROOT
    for key in offered:
        if parent is None or not key.endswith(group):
            if parent is not None:
                tails[group] = (parent, depth)
            group = key[-GROUP_NBYTES:]
            parent, depth = tail = tails.get(group, _ROOT)
        depth = tail[1] if key == tail[0] else depth + 1
        if key is expected:
            parents.append(parent)
            depths.append(depth)
            expected = next(wanted, None)
        parent = key
    if parent is not None:
        tails[group] = (parent, depth)
    return parents, depths
