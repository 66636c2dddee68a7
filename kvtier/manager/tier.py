"""The state of one tier: slots, copies, pins, eviction order and counters.

A copy is *pinned* while a transfer, a request or a deadline needs it, and *dirty* while a
slower tier must still receive it. A resident copy is *idle*, and may be evicted, if it is
neither pinned nor dirty. Only :class:`TierState` writes a copy's attributes, except the number
of grants, which :class:`~kvtier.manager.grants.Grants` writes, and the attributes of the
policies. So a tier always knows its number of idle copies, and no scan is needed to refuse a
store that cannot succeed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from kvtier.keys import ChunkKey
from kvtier.manager.copies import CopyList, prompt_order, split_prompts
from kvtier.manager.reports import TierCounters, TierSnapshot
from kvtier.manager.slots import SlotAllocator
from kvtier.policies import ChunkCopy, CopyState, Evictable, Eviction, PolicyContext
from kvtier.policies.base import (
    NO_TERMS,
    NoVictimError,
    RequestTerms,
    is_idle,
    is_unpinned,
    is_unpinned_leaf,
)

__all__ = ["TierState"]

_WRITING = CopyState.WRITING
_LATE = CopyState.LATE
_RESIDENT = CopyState.RESIDENT
_GONE = CopyState.GONE
_PREALLOCATED_COPIES = 1 << 18
"""Upper limit of the copy objects made at start, which take 80 ms and 46 MB."""


class TierState:
    """Slots, copies, eviction order and counters of one tier.

    When a chunk is evicted, its slot keeps the copy object for the next chunk. Making a new
    object would cost more than all other work for a chunk here. Nothing refers to an evicted
    copy. A dropped copy may still have references, so its slot gets a new object. RAM's objects
    are made at start, so that the scheduler does not pay for them later.

    Args:
        name: The tier's name.
        index: Index of the tier; 0 is RAM.
        capacity: Number of slots.
        eviction: Policy that orders the copies.

    Attributes:
        slots: The tier's slots. A dropped copy's slot becomes free when the copy loses its last
            pin.
        copies: Resident copies and copies being written, by key.
        writing: Number of copies that are being written.
        idle: Number of copies that can be evicted now.
        dirty: Number of dirty copies.
        transient: Number of RAM copies that are dropped after their load.
        leaving: Victims that a slower tier must receive before they are evicted. Until then
            they are hits outside the eviction order.
        drops: Number of copies dropped so far. While the number is constant, pinned copies stay
            in the tier.
        requested_slots: Largest number of slots requested in vain since the last reclaim.
        counters: What happened in the tier.
        policy_error: First time that the eviction policy picked too few victims; None if it
            never did.
    """

    def __init__(self, name: str, index: int, capacity: int, eviction: Eviction) -> None:
        self.name = name
        self.index = index
        self.eviction = eviction
        self.slots = SlotAllocator(capacity)
        self.copies: dict[ChunkKey, ChunkCopy] = {}
        self._copy_at: list[ChunkCopy | None] = [None] * capacity
        if not index:
            slots = range(min(capacity, _PREALLOCATED_COPIES))
            self._copy_at[: len(slots)] = [ChunkCopy(b"", slot) for slot in slots]
        self._children = _ChildCounts(self.copies) if eviction.leaf_only else None
        self.writing = self.idle = self.dirty = self.transient = 0
        self.leaving: set[ChunkCopy] = set()
        self.drops = 0
        self.requested_slots = 0
        self.counters = TierCounters()
        self.policy_error: NoVictimError | None = None

    @property
    def available(self) -> int:
        """Slots that are free or can be freed now by evicting."""
        return self.slots.free + self.idle

    def request_slots(self, slots: int) -> None:
        """Ask the next demotion to free ``slots`` slots, because too few were available."""
        self.requested_slots = max(self.requested_slots, min(slots, self.slots.capacity))

    def list_of(self, copies: Sequence[ChunkCopy]) -> CopyList:
        """Return a :class:`CopyList` of ``copies``, with the keys and slots of the copies."""
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
        return [
            copy
            for copy in map(self.copies.get, keys)
            if copy is not None and copy.state == _RESIDENT
        ]

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
        """Add copies that are being written, and pin each copy once for its writer.

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
        """Add copies that are being written from another tier; pin each copy for its writer.

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
            is_ordered: Whether ``copies`` are instead in the order in which another tier picked
                them as victims.
        """
        self.idle += self._end_writing(copies)
        if self._children is not None:
            self._children.arrive(copies)
        self.writing -= len(copies)
        self.counters.stored += len(copies)
        if is_ordered:
            self.eviction.on_insert_many(copies, ctx)
            return
        for prompt in split_prompts(copies) if self.index else (prompt_order(copies),):
            self.eviction.on_insert_many(self._touch_order(prompt), ctx)

    def add_recovered(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        """Add resident copies that survived a restart."""
        for copy in copies:
            copy.state = _RESIDENT
            self.copies[copy.key] = self._copy_at[copy.slot] = copy
        self.idle += len(copies)
        self.eviction.on_insert_many(copies, ctx)

    def expire(self, copy: ChunkCopy) -> bool:
        """Mark ``copy`` late if it is being written; return whether it was being written."""
        was_writing = copy.state == _WRITING
        if was_writing:
            copy.state = _LATE
        return was_writing

    def abort(self, copy: ChunkCopy) -> None:
        """Drop a copy whose bytes did not arrive, and remove its writer's pin."""
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
        """Increment the dirty count of resident ``copies``: one more tier must receive each."""
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
        """Decrement the dirty count of ``copies``: one tier fewer must receive each."""
        for copy in copies:
            if not copy.dirty:
                continue
            copy.dirty -= 1
            if not copy.dirty:
                self.dirty -= 1
                if not copy.pins and copy.state == _RESIDENT:
                    self.idle += 1

    def begin_demotion(self, copies: Iterable[ChunkCopy]) -> None:
        """Mark resident ``copies`` dirty and permanent, and pin them for a demotion."""
        busied = dirtied = 0
        for copy in copies:
            if copy.transient:
                self.make_permanent(copy)
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

    def make_transient(self, copy: ChunkCopy) -> None:
        """Mark a promoted RAM copy to be dropped after its load."""
        copy.transient = True
        self.transient += 1

    def make_permanent(self, copy: ChunkCopy) -> None:
        """Keep a transient RAM copy after its load; a permanent copy is unchanged."""
        if copy.transient:
            copy.transient = False
            self.transient -= 1

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
        """Return those of ``copies`` that are in :attr:`leaving` to the eviction order."""
        if self.leaving.isdisjoint(copies):
            return
        for copy in copies:
            if copy in self.leaving:
                self.leaving.discard(copy)
                self._return_victim(copy, ctx)

    # -- evicting ---------------------------------------------------------------------------

    def take_slots(
        self, count: int, ctx: PolicyContext
    ) -> tuple[list[int], list[ChunkKey]] | None:
        """Allocate ``count`` slots, evicting as many idle copies as needed.

        Returns:
            The slots, ascending, and the keys of the victims. None if too few copies can be
            evicted; then nothing changed.

        Raises:
            NoVictimError: The policy picked something that is not a copy.
        """
        shortage = count - self.slots.free
        if shortage <= 0:
            return self.slots.allocate(count), []
        if shortage > self.idle:
            return None
        victims = self._pick(shortage, is_idle, _is_idle_leaf, ctx)
        if len(victims) < shortage:
            if self.idle - sum(map(is_idle, self.leaving)) >= shortage:
                self._blame_policy()
            for victim in victims:
                self._return_victim(victim, ctx)
            return None
        self.idle -= shortage
        keys = [victim.key for victim in victims]
        self._forget(victims, keys)
        return self.slots.exchange([victim.slot for victim in victims], count), keys

    def pick_leaving(self, count: int, ctx: PolicyContext) -> list[ChunkCopy]:
        """Move up to ``count`` unpinned victims, dirty or not, to ``leaving``; return them."""
        victims = self._pick(count, is_unpinned, is_unpinned_leaf, ctx)
        if not victims and count > 0 and self.policy_error is None and self._has_unpinned():
            self._blame_policy()
        self.leaving.update(victims)
        return victims

    def evict_leaving(self, listed: CopyList) -> None:
        """Evict ``listed``: unpinned copies in :attr:`leaving`, clean or dirty."""
        victims = listed.copies
        dirty = 0
        for victim in victims:
            if victim.dirty:
                victim.dirty = 0
                dirty += 1
        self.dirty -= dirty
        self.idle -= len(victims) - dirty
        self.leaving.difference_update(victims)
        self._forget(victims, listed.keys)
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
        if copy.transient:
            self.transient -= 1
        del self.copies[copy.key]
        if self._children is not None:
            self._children.orphan(copy)
        if not copy.pins:
            self.slots.release((copy.slot,))

    # -- internals --------------------------------------------------------------------------

    def _touch_order(self, prompt: Sequence[ChunkCopy]) -> Sequence[ChunkCopy]:
        """Return ``prompt``, reversed if the eviction policy wants uses from leaf to root."""
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
        """Return the copy object of each slot; create the objects that do not exist yet.

        An evicted copy was not pinned, dirty, granted or transient. The policy sets its own
        attributes when the copy is inserted; the caller sets all others.
        """
        at = self._copy_at
        copies = [copy for copy in map(at.__getitem__, slots) if copy]
        if len(copies) < len(slots):
            copies = [at[slot] or ChunkCopy(b"", slot) for slot in slots]
            for copy in copies:
                at[copy.slot] = copy
        return copies

    def _forget(self, victims: Sequence[ChunkCopy], keys: Sequence[ChunkKey]) -> None:
        """Make picked copies misses and count them as evicted.

        The next write into a victim's slot sets the state of its copy object.
        """
        deque(map(self.copies.__delitem__, keys), maxlen=0)
        if self._children is not None:
            for victim in victims:
                self._children.orphan(victim)
        self.counters.evicted += len(victims)

    def _pick(
        self, count: int, evictable: Evictable, evictable_leaf: Evictable, ctx: PolicyContext
    ) -> list[ChunkCopy]:
        """Remove up to ``count`` victims from the eviction order and return them.

        Raises:
            NoVictimError: The policy picked something that is not a copy.
        """
        if self._children is None:
            victims = self.eviction.pick_many(count, evictable, ctx)
            if not {ChunkCopy}.issuperset(map(type, victims)):
                picked = next(each for each in victims if type(each) is not ChunkCopy)
                raise NoVictimError(self.eviction, picked)
            return victims
        # One by one: a parent becomes a candidate when its last child was picked.
        victims = []
        while len(victims) < count:
            victim = self.eviction.pick(evictable_leaf, ctx)
            if victim is None:
                break
            self._children.remove(victim)
            victims.append(victim)
        return victims

    def _has_unpinned(self) -> bool:
        """Return whether a copy in the eviction order has no pins; takes time."""
        return any(
            copy.state == _RESIDENT and not copy.pins and copy not in self.leaving
            for copy in self.copies.values()
        )

    def _blame_policy(self) -> None:
        """Record that the policy picked fewer victims than it has."""
        if self._children is None and self.policy_error is None:
            self.policy_error = NoVictimError(self.eviction)

    def _return_victim(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        """Put a picked copy back into the eviction order."""
        if self._children is not None:
            self._children.add(copy)
        self.eviction.on_stay(copy, ctx)

    def _leave_order(self, copy: ChunkCopy) -> None:
        if not copy.pins and not copy.dirty:
            self.idle -= 1
        if copy in self.leaving:
            self.leaving.discard(copy)
            return
        self.eviction.on_remove(copy)
        if self._children is not None:
            self._children.remove(copy)


def _is_idle_leaf(copy: ChunkCopy) -> bool:
    return is_unpinned_leaf(copy) and not copy.dirty


class _ChildCounts:
    """Keeps ``copy.child_count`` for a policy that evicts leaves only.

    A child may arrive before its parent, and stay after its parent was dropped. So the children
    of absent chunks are counted too.

    Args:
        copies: The tier's copies, by key.
    """

    __slots__ = ("_copies", "_of_absent")

    def __init__(self, copies: Mapping[ChunkKey, ChunkCopy]) -> None:
        self._copies = copies
        self._of_absent: dict[ChunkKey, int] = {}

    def arrive(self, copies: Sequence[ChunkCopy]) -> None:
        """Count each of ``copies`` as a child of its parent, and restore its child count."""
        for copy in copies:
            copy.child_count += self._of_absent.pop(copy.key, 0)
            self.add(copy)

    def add(self, copy: ChunkCopy) -> None:
        """Count ``copy`` as a child of its parent."""
        self._count(copy.parent, 1)

    def remove(self, copy: ChunkCopy) -> None:
        """Stop counting ``copy``, which left the eviction order, as a child."""
        self._count(copy.parent, -1)

    def orphan(self, copy: ChunkCopy) -> None:
        """Save the child count under ``copy.key``, because ``copy`` left the tier."""
        if copy.child_count:
            self._count_of_absent(copy.key, copy.child_count)
            copy.child_count = 0

    def _count(self, parent: ChunkKey | None, change: int) -> None:
        if parent is None:
            return
        copy = self._copies.get(parent)
        if copy is not None:
            copy.child_count += change
        else:
            self._count_of_absent(parent, change)

    def _count_of_absent(self, key: ChunkKey, change: int) -> None:
        children = self._of_absent.pop(key, 0) + change
        if children:
            self._of_absent[key] = children
