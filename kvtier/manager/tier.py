"""The state of one tier: slots, copies, pins, eviction order and counters.

A copy is *pinned* while a transfer, a request or a deadline needs it, and *dirty* while a
slower tier must still receive it. A resident copy is *idle*, and may be evicted, if it is
neither pinned nor dirty. Only :class:`TierState` writes a copy's attributes, with two
exceptions: :class:`~kvtier.manager.grants.Grants` writes the number of grants, and policies
write their own attributes. So a tier always knows its number of idle copies, and can refuse an
impossible store without a scan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.keys import ChunkKey
from kvtier.manager.copies import CopyList, prompt_order, split_prompts
from kvtier.manager.reports import TierCounters, TierSnapshot
from kvtier.manager.slots import SlotAllocator
from kvtier.policies import ChunkCopy, CopyState, Evictable, Eviction, PolicyContext
from kvtier.policies.base import (
    NO_TERMS,
    NoVictimError,
    RequestTerms,
    is_evictable,
    is_unpinned,
)
from kvtier.policies.eviction import Lru

__all__ = ["TierState"]

_WRITING = CopyState.WRITING
_LATE = CopyState.LATE
_RESIDENT = CopyState.RESIDENT
_GONE = CopyState.GONE
_PREALLOCATED_COPIES = 1 << 18
"""Upper limit of the number of copy objects made at the start; they take 80 ms and 46 MB."""


class TierState:
    """Slots, copies, eviction order and counters of one tier.

    After an eviction, the slot keeps the ``ChunkCopy`` object for the next chunk, because
    creating an object takes most of the time per chunk in this class. An evicted copy has no
    references. A dropped copy may have some, so its slot gets a new object. Many of RAM's
    objects are created at the start, so that they do not delay the scheduler later.

    Args:
        name: The tier's name.
        index: Index of the tier; 0 is RAM.
        capacity: Number of slots.
        eviction: Policy that orders the copies.
        is_shared: Whether other engines store chunks in the tier too, so that only a question
            tells which chunks it has.

    Attributes:
        slots: The tier's slots. A dropped copy's slot becomes free when the copy loses its last
            pin.
        copies: Resident copies and copies being written, by key.
        writing: Number of copies that are being written.
        idle: Number of copies that can be evicted now.
        dirty: Number of dirty copies.
        leaving: Victims that a slower tier must receive before they are evicted. Until then
            they are hits outside the eviction order.
        drops: Number of dropped copies plus number of resets. While this number is unchanged,
            pinned copies stay in the tier.
        requested_slots: Largest number of slots that a caller of :meth:`request_slots` needed
            since the last reclaim.
        counters: Counters of the tier's events.
        policy_error: The reason why ``lru`` replaced the eviction policy; None without a
            replacement.
    """

    def __init__(
        self,
        name: str,
        index: int,
        capacity: int,
        eviction: Eviction,
        *,
        is_shared: bool = False,
    ) -> None:
        self.name = name
        self.index = index
        self.is_shared = is_shared
        self.eviction = eviction
        self.slots = SlotAllocator(capacity)
        self.copies: dict[ChunkKey, ChunkCopy] = {}
        self._copy_at: list[ChunkCopy | None] = [None] * capacity
        if not index:
            slots = range(min(capacity, _PREALLOCATED_COPIES))
            self._copy_at[: len(slots)] = [ChunkCopy(b"", slot) for slot in slots]
        self.writing = self.idle = self.dirty = 0
        self.leaving: set[ChunkCopy] = set()
        self.drops = 0
        self.requested_slots = 0
        self.counters = TierCounters()
        self.policy_error: NoVictimError | None = None

    @property
    def available(self) -> int:
        """Number of slots that are free or can be freed now by evictions."""
        return self.slots.free + self.idle

    def request_slots(self, slots: int) -> None:
        """Ask the next demotion to free ``slots`` slots, because too few were available."""
        self.requested_slots = max(self.requested_slots, min(slots, self.slots.capacity))

    def list_of(self, copies: Sequence[ChunkCopy]) -> CopyList:
        """Return a :class:`CopyList` of ``copies``."""
        keys = [copy.key for copy in copies]
        return CopyList(copies, keys, [copy.slot for copy in copies], self.drops)

    def leading(self, keys: Iterable[ChunkKey]) -> list[ChunkCopy]:
        """Return the resident copies of ``keys`` up to the first missing key."""
        found: list[ChunkCopy] = []
        for copy in map(self.copies.get, keys):
            if copy is None or copy.state != _RESIDENT:
                break
            found.append(copy)
        return found

    def resident(self, keys: Iterable[ChunkKey]) -> list[ChunkCopy]:
        """Return the resident copies of ``keys``."""
        found = map(self.copies.get, keys)
        return [copy for copy in found if copy is not None and copy.state == _RESIDENT]

    def snapshot(self, *, quarantined: int = 0) -> TierSnapshot:
        """Return the current state of the tier, and a copy of its counters."""
        return TierSnapshot(
            name=self.name,
            capacity=self.slots.capacity,
            used=self.slots.capacity - self.slots.free,
            resident=len(self.copies) - self.writing,
            held=len(self.copies) - self.idle,
            dirty=self.dirty,
            quarantined=quarantined,
            counters=self.counters.snapshot(),
        )

    # -- writing ----------------------------------------------------------------------------

    def begin_writing(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        parents: Iterable[ChunkKey | None],
        depths: Iterable[int],
        generation: int = 0,
        terms: RequestTerms = NO_TERMS,
    ) -> list[ChunkCopy]:
        """Add copies that will be written, and pin each copy once for its writer.

        Args:
            keys: Chunks that this tier lacks.
            slots: Allocated slot of each chunk.
            parents: The chunk before each chunk in its prefix, or None.
            depths: Number of chunks before each chunk in its prefix.
            generation: Generation of the write.
            terms: Terms of the request that stores the chunks.
        """
        copies = self._reuse(slots)
        for copy, key, parent, depth in zip(copies, keys, parents, depths, strict=False):
            copy.key = key
            copy.parent = parent
            copy.depth = depth
            copy.terms = terms
            copy.generation = generation
            copy.state = _WRITING
            copy.pins = 1
            copy.hits = copy.origin = 0
        self.copies.update(zip(keys, copies, strict=True))
        self.writing += len(copies)
        return copies

    def begin_copying(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        sources: Sequence[ChunkCopy],
        *,
        origin: int = 0,
        generation: int = 0,
    ) -> list[ChunkCopy]:
        """Add copies that will be written from another tier; pin each copy for its writer.

        Args:
            keys: Chunks that this tier lacks.
            slots: Allocated slot of each chunk.
            sources: Copies in the other tier.
            origin: Index of that tier for a promotion, else 0.
            generation: Generation of the write.
        """
        copies = self._reuse(slots)
        for copy, key, source in zip(copies, keys, sources, strict=True):
            copy.key = key
            copy.parent = source.parent
            copy.depth = source.depth
            copy.terms = source.terms
            copy.state = _WRITING
            copy.pins = 1
            copy.hits = 0
        if not self.index:  # copies in slower tiers have neither
            for copy in copies:
                copy.generation = generation
                copy.origin = origin
        self.copies.update(zip(keys, copies, strict=True))
        self.writing += len(copies)
        return copies

    def publish(
        self, copies: Sequence[ChunkCopy], ctx: PolicyContext, *, is_ordered: bool = False
    ) -> None:
        """Make written copies resident and remove their writer's pin.

        Args:
            copies: Sorted by prompt, then by group, then from root to leaf.
            ctx: The information that policies may use.
            is_ordered: If true, ``copies`` are instead in the order in which another tier
                picked them as victims.
        """
        self.idle += self._end_writing(copies)
        self.writing -= len(copies)
        self.counters.stored += len(copies)
        if is_ordered:
            self.eviction.on_insert_many(copies, ctx)
            return
        for prompt in split_prompts(copies) if self.index else (prompt_order(copies),):
            self.eviction.on_insert_many(self._touch_order(prompt), ctx)

    def add_resident(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        """Add resident copies that this engine did not write, in eviction order."""
        for copy in copies:
            copy.state = _RESIDENT
            self.copies[copy.key] = self._copy_at[copy.slot] = copy
        self.idle += len(copies)
        self.eviction.on_insert_many(copies, ctx)

    def expire(self, copy: ChunkCopy) -> bool:
        """If ``copy`` is being written, mark it late; return whether it is being written."""
        was_writing = copy.state == _WRITING
        if was_writing:
            copy.state = _LATE
        return was_writing

    def abort(self, copy: ChunkCopy) -> None:
        """Drop a copy whose bytes failed to arrive, and remove its writer's pin."""
        self.drop(copy)
        self.unpin((copy,))

    # -- pins and dirty counts --------------------------------------------------------------

    def pin(self, copies: Iterable[ChunkCopy]) -> None:
        """Protect ``copies`` from eviction until the matching :meth:`unpin`."""
        busied = 0
        for copy in copies:
            if not copy.pins and not copy.dirty:
                busied += 1
            copy.pins += 1
        self.idle -= busied

    def unpin(self, copies: Iterable[ChunkCopy]) -> None:
        """Remove one pin of each copy; the last pin of a dropped copy frees the copy's slot."""
        freed = 0
        for copy in copies:
            copy.pins = pins = copy.pins - 1
            if pins or copy.dirty:
                continue
            if copy.state == _RESIDENT:
                freed += 1
            elif copy.state == _GONE:
                self.slots.release((copy.slot,))
        self.idle += freed

    def mark_dirty(self, copies: Iterable[ChunkCopy]) -> None:
        """Increment the dirty count of resident ``copies``; one more tier needs them."""
        busied = dirtied = 0
        for copy in copies:
            if not copy.dirty:
                dirtied += 1
                if not copy.pins:
                    busied += 1
            copy.dirty += 1
        self.idle -= busied
        self.dirty += dirtied

    def mark_clean(self, copies: Iterable[ChunkCopy]) -> None:
        """Decrement the dirty count of ``copies``, because one tier no longer needs them."""
        for copy in copies:
            if not copy.dirty:
                continue
            copy.dirty -= 1
            if not copy.dirty:
                self.dirty -= 1
                if not copy.pins and copy.state == _RESIDENT:
                    self.idle += 1

    def begin_demotion(self, copies: Iterable[ChunkCopy]) -> None:
        """Mark resident ``copies`` dirty, and pin them for a demotion."""
        busied = dirtied = 0
        for copy in copies:
            pins, dirty = copy.pins, copy.dirty
            copy.pins = pins + 1
            copy.dirty = dirty + 1
            if not dirty:
                dirtied += 1
                if not pins:
                    busied += 1
        self.idle -= busied
        self.dirty += dirtied

    def end_demotion(self, copies: Sequence[ChunkCopy]) -> None:
        """Unpin the sources of a demotion job and decrement their dirty count."""
        others = []
        for copy in copies:
            if copy.pins == 1 and copy.dirty == 1:
                copy.pins = copy.dirty = 0
            else:
                others.append(copy)
        cleaned = len(copies) - len(others)
        self.dirty -= cleaned
        self.idle += cleaned
        self.mark_clean(others)
        self.unpin(others)

    # -- uses -------------------------------------------------------------------------------

    def count_hits(self, copies: Iterable[ChunkCopy]) -> None:
        """Increment the number of hits of ``copies``."""
        for copy in copies:
            copy.hits += 1

    def clear_origins(self, copies: Iterable[ChunkCopy]) -> None:
        """Record that promoted ``copies`` were loaded, so that later hits count for RAM."""
        for copy in copies:
            copy.origin = 0

    def touch(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        """Record a use of a prompt's resident ``copies``, given per group from root to leaf."""
        self.touch_each(self._touch_order(prompt_order(copies)), ctx)

    def touch_each(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        """Record a use of each resident copy, in the given order."""
        self.restore(copies, ctx)
        self.eviction.on_hit_many(copies, ctx)

    def restore(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        """Put the ``copies`` that are in :attr:`leaving` back into the eviction order."""
        if self.leaving.isdisjoint(copies):
            return
        for copy in copies:
            if copy in self.leaving:
                self.leaving.discard(copy)
                self.eviction.on_stay(copy, ctx)

    # -- evicting ---------------------------------------------------------------------------

    def take_slots(self, count: int, ctx: PolicyContext) -> tuple[list[int], list[ChunkKey]]:
        """Allocate ``count`` slots, evicting idle copies if needed.

        Args:
            count: At most :attr:`available`.
            ctx: The information that policies may use.

        Returns:
            The slots, ascending, and the keys of the victims.
        """
        shortage = count - self.slots.free
        if shortage <= 0:
            return self.slots.allocate(count), []
        victims = self._pick(shortage, is_evictable, ctx)
        if len(victims) < shortage:
            self._replace_policy(NoVictimError(self.eviction), ctx)
            victims = self.eviction.pick_many(shortage, is_evictable, ctx)
        self.idle -= len(victims)
        keys = [victim.key for victim in victims]
        self._evict_keys(keys)
        return self.slots.exchange([victim.slot for victim in victims], count), keys

    def pick_leaving(self, count: int, ctx: PolicyContext) -> list[ChunkCopy]:
        """Move up to ``count`` unpinned victims, dirty or not, to ``leaving``; return them."""
        victims = self._pick(count, is_unpinned, ctx)
        if not (victims or self.leaving) and self._spares_oldest():
            self._replace_policy(NoVictimError(self.eviction), ctx)
            victims = self._pick(count, is_unpinned, ctx)
        self.leaving.update(victims)
        return victims

    def evict_leaving(self, listed: CopyList) -> None:
        """Evict the copies in ``listed``, which must be unpinned and in :attr:`leaving`."""
        victims = listed.copies
        dirty = 0
        for victim in victims:
            if victim.dirty:
                victim.dirty = 0
                dirty += 1
        self.dirty -= dirty
        self.idle -= len(victims) - dirty
        self.leaving.difference_update(victims)
        self._evict_keys(listed.keys)
        self.slots.release(listed.slots)

    def drop(self, copy: ChunkCopy) -> None:
        """Make ``copy`` a miss; its slot becomes free when the copy has no pin."""
        if copy.state == _GONE:
            return
        was_resident = copy.state == _RESIDENT
        copy.state = _GONE
        self.drops += 1
        self._copy_at[copy.slot] = None
        if was_resident:
            self._leave_order(copy)
        else:
            self.writing -= 1
        if copy.dirty:
            copy.dirty = 0
            self.dirty -= 1
        del self.copies[copy.key]
        if not copy.pins:
            self.slots.release((copy.slot,))

    def reset(self, held: Iterable[ChunkCopy]) -> dict[ChunkKey, ChunkCopy]:
        """Make every chunk a miss; pinned copies keep their slots.

        The time does not depend on the number of resident copies. The eviction policy starts
        empty. Copies that are not in ``held`` must have no references.

        Args:
            held: All copies with pins. Each keeps its slot until it loses its last pin.

        Returns:
            The copies that were resident, by key.
        """
        resident = self.copies
        pinned = {copy for copy in held if copy.pins}
        for copy in pinned:
            if copy.state in (_WRITING, _LATE):
                del resident[copy.key]
            copy.state = _GONE
            copy.dirty = 0
        self.copies = {}
        self._copy_at = [None] * self.slots.capacity
        self.slots = SlotAllocator(self.slots.capacity)
        self.slots.take(copy.slot for copy in pinned)
        self.writing = self.idle = self.dirty = 0
        self.leaving = set()
        self.drops += 1
        self.eviction = type(self.eviction)(self.eviction.capacity)
        return resident

    # -- internals --------------------------------------------------------------------------

    def _touch_order(self, prompt: Sequence[ChunkCopy]) -> Sequence[ChunkCopy]:
        """Return ``prompt``, reversed if the eviction policy expects uses from leaf to root."""
        return prompt if self.eviction.touch_order == "forward" else prompt[::-1]

    def _end_writing(self, copies: Sequence[ChunkCopy]) -> int:
        """Unpin ``copies`` and make them resident; return how many have no other pin."""
        if self.index:
            for copy in copies:  # in a slower tier only the writer pins a copy
                copy.state = _RESIDENT
                copy.pins = 0
            return len(copies)
        pinned = 0
        for copy in copies:
            copy.state = _RESIDENT
            copy.pins = pins = copy.pins - 1
            if pins:
                pinned += 1
        return len(copies) - pinned

    def _reuse(self, slots: Sequence[int]) -> list[ChunkCopy]:
        """Return the copy object of each slot, and create the missing objects.

        An evicted copy was clean and had neither a pin nor a grant. The policy sets its own
        attributes at the insertion of the copy; the caller sets all others.
        """
        at = self._copy_at
        return [at[slot] or self._new_copy(slot) for slot in slots]

    def _new_copy(self, slot: int) -> ChunkCopy:
        copy = self._copy_at[slot] = ChunkCopy(b"", slot)
        return copy

    def _evict_keys(self, keys: Sequence[ChunkKey]) -> None:
        """Make the ``keys`` of picked victims misses, and count the evictions.

        The victims' copy objects keep their state until the next write into their slots.
        """
        copies = self.copies
        for key in keys:
            del copies[key]
        self.counters.evicted += len(keys)

    def _pick(self, count: int, evictable: Evictable, ctx: PolicyContext) -> list[ChunkCopy]:
        """Remove up to ``count`` victims from the eviction order and return them."""
        victims = self.eviction.pick_many(count, evictable, ctx)
        if {ChunkCopy}.issuperset(map(type, victims)):
            return victims
        picked = next(each for each in victims if type(each) is not ChunkCopy)
        self._replace_policy(NoVictimError(self.eviction, picked), ctx)
        return self.eviction.pick_many(count, evictable, ctx)

    def _replace_policy(self, error: NoVictimError, ctx: PolicyContext) -> None:
        """Replace the faulty eviction policy by ``lru``, and record the error."""
        self.policy_error = error
        self.eviction = Lru(self.slots.capacity)
        for copy in self.copies.values():
            if copy.state == _RESIDENT and copy not in self.leaving:
                copy.queued, copy.policy = 0, None
                self.eviction.on_insert(copy, ctx)

    def _spares_oldest(self) -> bool:
        """Return whether the oldest copy is unpinned, so that a policy could pick it."""
        oldest = next(iter(self.copies.values()), None)
        return oldest is not None and oldest.state == _RESIDENT and not oldest.pins

    def _leave_order(self, copy: ChunkCopy) -> None:
        if not copy.pins and not copy.dirty:
            self.idle -= 1
        if copy in self.leaving:
            self.leaving.discard(copy)
        else:
            self.eviction.on_remove(copy)
