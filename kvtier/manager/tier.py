"""One tier as the manager sees it: slots, copies, an eviction order and counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from kvtier.keys import ChunkKey
from kvtier.manager.counters import TierCounters, TierSnapshot
from kvtier.manager.holds import Holds
from kvtier.manager.kids import Kids, is_idle_leaf
from kvtier.manager.order import across_groups, prompts_of
from kvtier.manager.run import Run
from kvtier.policies import ChunkCopy, CopyState, Eviction, PolicyContext
from kvtier.policies.base import NO_TERMS, RequestTerms, is_idle, is_unpinned, is_unpinned_leaf

__all__ = ["TierState"]

_WRITING = CopyState.WRITING
_RESIDENT = CopyState.RESIDENT
_GONE = CopyState.GONE
_MADE_AHEAD = 1 << 18
"""Most copies made before they are needed: 80 ms and 46 MB."""


class TierState(Holds):
    """Copies, order and counters of one tier, with what holds the copies.

    A slot keeps its copy object when its chunk is evicted, and the next chunk takes it over:
    nothing refers to a copy that could be evicted, and making an object costs more than all
    else that becomes of a chunk here. What is dropped may still be referred to, so the slot
    then gets a new one. RAM's objects are made when the tier is, like its memory, so that the
    scheduler does not wait for them while RAM fills.

    Args:
        name: The tier's name.
        index: Its place in the ladder; 0 is RAM.
        capacity: Its slots.
        eviction: Orders its copies.

    Attributes:
        copies: What is resident and what is being written, by key.
        writing: How many of them are not whole yet.
        leaving: Victims that were picked but must first reach a slower tier: hits until then,
            but no longer in the eviction order.
        departed: Counts the copies that left without having been victims: while it stands
            still, who was pinned is here.
        wanted: Most slots that somebody asked for in vain in this step.
        quarantined: Slots kept from reuse until a worker acknowledged its jobs.
        counters: What happened in the tier.
    """

    __slots__ = (
        "_copy_at",
        "_kids",
        "copies",
        "counters",
        "departed",
        "eviction",
        "index",
        "leaving",
        "name",
        "quarantined",
        "wanted",
        "writing",
    )

    def __init__(self, name: str, index: int, capacity: int, eviction: Eviction) -> None:
        super().__init__(capacity)
        self.name = name
        self.index = index
        self.eviction = eviction
        self.copies: dict[ChunkKey, ChunkCopy] = {}
        self._copy_at: list[ChunkCopy | None] = [None] * capacity
        if not index:
            ahead = range(min(capacity, _MADE_AHEAD))
            self._copy_at[: len(ahead)] = [ChunkCopy(b"", slot) for slot in ahead]
        self._kids = Kids(self.copies) if eviction.leaf_only else None
        self.writing = 0
        self.leaving: set[ChunkCopy] = set()
        self.departed = 0
        self.wanted = 0
        self.quarantined = 0
        self.counters = TierCounters()

    def begin_writing(
        self,
        keys: Sequence[ChunkKey],
        slots: Sequence[int],
        parents: Iterable[ChunkKey | None],
        depths: Iterable[int],
        generation: int = 0,
        terms: RequestTerms = NO_TERMS,
    ) -> list[ChunkCopy]:
        """Add chunks whose bytes are on their way; each copy holds one pin for its writer.

        Args:
            keys: The chunks, none of them here.
            slots: Where each goes; allocated.
            parents: The chunk before each in its prefix, or None.
            depths: How many chunks are before it.
            generation: Stamp of the write.
            terms: Of the request that stores them.
        """
        copies = self._take_over(slots)
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
        """Do :meth:`begin_writing` for chunks that come from another tier.

        Args:
            keys: The chunks, none of them here.
            slots: Where each goes; allocated.
            sources: Their copies in the other tier.
            origin: Index of that tier if they are to be loaded, else 0.
            generation: Stamp of the write.
        """
        copies = self._take_over(slots)
        for copy, key, source in zip(copies, keys, sources, strict=True):
            copy.key = key
            copy.parent = source.parent
            copy.depth = source.depth
            copy.terms = source.terms
            copy.state = _WRITING
            copy.pins = 1
            copy.hits = 0
        if not self.index:  # slower tiers have neither
            for copy in copies:
                copy.generation = generation
                copy.origin = origin
        self.copies.update(zip(keys, copies, strict=True))
        self.writing += len(copies)
        return copies

    def add_resident(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        """Add copies that are whole already: what survived a restart."""
        for copy in copies:
            copy.state = _RESIDENT
            self.copies[copy.key] = self._copy_at[copy.slot] = copy
        self.idle += len(copies)
        self.eviction.on_insert_many(copies, ctx)

    def publish(
        self, copies: Sequence[ChunkCopy], ctx: PolicyContext, *, is_ordered: bool = False
    ) -> None:
        """Make written copies hits and drop their writer's pin.

        Args:
            copies: Prompt after prompt; of each group after group, and of those root to leaf.
            ctx: What the policy is told besides.
            is_ordered: Whether they come instead in the order in which another tier evicted
                them.
        """
        self.idle += self._end_writing(copies)
        if self._kids is not None:
            self._kids.arrive(copies)
        self.writing -= len(copies)
        self.counters.stored += len(copies)
        if is_ordered:
            self.eviction.on_insert_many(copies, ctx)
            return
        for prompt in prompts_of(copies) if self.index else (across_groups(copies),):
            self.eviction.on_insert_many(self._ordered(prompt), ctx)

    def run_of(self, copies: Sequence[ChunkCopy]) -> Run:
        """Return the run of ``copies``."""
        keys = [copy.key for copy in copies]
        return Run(copies, keys, [copy.slot for copy in copies], self.departed)

    def drop(self, copy: ChunkCopy) -> None:
        """Make ``copy`` a miss; its slot is free once nothing pins it."""
        if copy.state == _GONE:
            return
        was_resident = copy.state == _RESIDENT
        copy.state = _GONE
        self.departed += 1
        self._copy_at[copy.slot] = None
        if was_resident:
            self._leave_order(copy)
        else:
            self.writing -= 1
        if copy.dirty:
            copy.dirty = 0
            self.dirty -= 1
        if copy.transient:
            self.passing -= 1
        del self.copies[copy.key]
        if self._kids is not None:
            self._kids.orphan(copy)
        if not copy.pins:
            self.slots.release((copy.slot,))

    def abort(self, copy: ChunkCopy) -> None:
        """Take back the writer's pin of a copy whose bytes did not arrive, and drop it."""
        self.drop(copy)
        self.unpin(copy)

    def want(self, slots: int) -> None:
        """Note that ``slots`` slots were asked for in vain, so that room is made ahead."""
        self.wanted = max(self.wanted, min(slots, self.slots.capacity))

    def pick_leaving(self, count: int, ctx: PolicyContext) -> list[ChunkCopy]:
        """Take the best ``count`` unpinned copies out of the order, clean or dirty.

        They are leaving from now on.

        Returns:
            The victims; fewer when there are no more.
        """
        if self._kids is None:
            victims = self.eviction.pick_many(count, is_unpinned, ctx)
        else:
            victims = self._kids.pick_many(self.eviction, count, is_unpinned_leaf, ctx)
        self.leaving.update(victims)
        return victims

    def let_go(self, run: Run) -> None:
        """Drop leaving copies that nothing pins, clean or dirty, and count them as evicted."""
        victims = run.copies
        dirty = 0
        for victim in victims:
            if victim.dirty:
                victim.dirty = 0
                dirty += 1
        self.dirty -= dirty
        self.idle -= len(victims) - dirty
        self.leaving.difference_update(victims)
        self._forget(victims, run.keys)
        self.slots.release(run.slots)

    def stay(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        """Put a leaving copy back into the order."""
        if copy in self.leaving:
            self.leaving.discard(copy)
            self._enter_order(copy, ctx)

    def keep(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        """Do :meth:`stay` for ``copies``."""
        if not self.leaving.isdisjoint(copies):
            for copy in copies:
                self.stay(copy, ctx)

    def lead_of(self, keys: Iterable[ChunkKey]) -> list[ChunkCopy]:
        """Return the copies of the leading ``keys`` that are whole here."""
        found: list[ChunkCopy] = []
        for copy in map(self.copies.get, keys):
            if copy is None or copy.state != _RESIDENT:
                break
            found.append(copy)
        return found

    def whole(self, keys: Iterable[ChunkKey]) -> list[ChunkCopy]:
        """Return the copies of those of ``keys`` that are whole here."""
        return [
            copy
            for copy in map(self.copies.get, keys)
            if copy is not None and copy.state == _RESIDENT
        ]

    def take_slots(
        self, count: int, ctx: PolicyContext
    ) -> tuple[list[int], list[ChunkKey]] | None:
        """Allocate ``count`` slots, evicting as many copies as it takes.

        Returns:
            The slots, ascending, and the keys of the victims; None, and nothing changed, when
            there is not enough to evict.
        """
        shortage = count - self.slots.free
        if shortage <= 0:
            return self.slots.allocate(count), []
        if shortage > self.idle:
            return None
        victims = self._pick(shortage, ctx)
        if len(victims) < shortage:
            for victim in victims:
                self._enter_order(victim, ctx)
            return None
        self.idle -= shortage
        keys = [victim.key for victim in victims]
        self._forget(victims, keys)
        return self.slots.exchange([victim.slot for victim in victims], count), keys

    def touch(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        """Note a use of resident ``copies`` of a prompt: group after group, root to leaf."""
        self.use(self._ordered(across_groups(copies)), ctx)

    def use(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        """Note a use of one resident copy after the other."""
        self.keep(copies, ctx)
        self.eviction.on_hit_many(copies, ctx)

    def snapshot(self) -> TierSnapshot:
        """Return the tier's figures now."""
        return TierSnapshot(
            name=self.name,
            capacity=self.slots.capacity,
            used=self.slots.capacity - self.slots.free,
            resident=len(self.copies) - self.writing,
            held=len(self.copies) - self.idle,
            dirty=self.dirty,
            quarantined=self.quarantined,
            counters=self.counters.snapshot(),
        )

    def _ordered(self, prompt: Sequence[ChunkCopy]) -> Sequence[ChunkCopy]:
        """Return the copies of ``prompt``, given root to leaf, in the policy's touch order."""
        return prompt if self.eviction.touch_order == "forward" else prompt[::-1]

    def _end_writing(self, copies: Sequence[ChunkCopy]) -> int:
        """Make ``copies`` resident and drop their writer's pin; return how many are idle."""
        if self.index:
            for copy in copies:  # in a slower tier nobody else holds what is not whole
                copy.state = _RESIDENT
                copy.pins = 0
            return len(copies)
        held = 0
        for copy in copies:
            copy.state = _RESIDENT
            copy.pins = pins = copy.pins - 1
            if pins:
                held += 1
        return len(copies) - held

    def _take_over(self, slots: Sequence[int]) -> list[ChunkCopy]:
        """Return the copy object of each of ``slots``; those not there yet are made.

        What was evicted was not pinned, dirty, granted or passing, and what the policy owns of
        it is the policy's to set when it is inserted. The rest is the caller's to set.
        """
        at = self._copy_at
        copies = [copy for copy in map(at.__getitem__, slots) if copy]
        if len(copies) < len(slots):
            copies = [at[slot] or ChunkCopy(b"", slot) for slot in slots]
            for copy in copies:
                at[copy.slot] = copy
        return copies

    def _forget(self, victims: Sequence[ChunkCopy], keys: Sequence[ChunkKey]) -> None:
        """Make copies that left the order misses, and count them as evicted.

        Nobody refers to them but their slots, so their state is left to the next write.
        """
        deque(map(self.copies.__delitem__, keys), maxlen=0)
        if self._kids is not None:
            for victim in victims:
                self._kids.orphan(victim)
        self.counters.evicted += len(victims)

    def _pick(self, count: int, ctx: PolicyContext) -> list[ChunkCopy]:
        if self._kids is None:
            return self.eviction.pick_many(count, is_idle, ctx)
        return self._kids.pick_many(self.eviction, count, is_idle_leaf, ctx)

    def _enter_order(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        """Put a picked copy back into the order."""
        if self._kids is not None:
            self._kids.enter(copy)
        self.eviction.on_stay(copy, ctx)

    def _leave_order(self, copy: ChunkCopy) -> None:
        if not copy.pins and not copy.dirty:
            self.idle -= 1
        if copy in self.leaving:
            self.leaving.discard(copy)
            return
        self.eviction.on_remove(copy)
        if self._kids is not None:
            self._kids.leave(copy)
