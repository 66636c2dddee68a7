"""Least hit density hedged with LRU: evicts the chunk with the lowest hit density.

LRU keeps every chunk for the same time. But some chunks are likelier to be used again than
others, and the difference depends on the traffic. This policy sorts chunks into classes. It
learns how many hits a slot earns with each class at each age (:mod:`._hit_density`), and evicts
from the class that earns least.

Recency is hard to beat where sessions continue, and classes mislead when traffic changes. So
the policy departs from LRU only within a regret budget
(:class:`~._lhd_history.RegretBudget`). The order of all last uses shows which chunks LRU would
hold (:class:`~._lhd_history.Timeline`).

Updating this history for each chunk would cost too much. But the chunks of a prompt are
inserted, used and evicted together. So copies are kept in *cohorts*, move in batches
(:class:`MoveBatch`) and are evicted in selections (:class:`Victims`). The history is updated
once per batch and once per selection. A single chunk costs a few attribute writes.

A copy that must stay moves to the newest cohort, like a copy just used. If a whole class were
pinned, each pick would scan the class. So after a pick that rejected n copies, the next n picks
choose victims by age alone, and the rejected copies are now the youngest. If every copy must
stay, none is moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from operator import gt, lt
from typing import Final

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy, Evictable, Eviction, PolicyContext
from kvtier.policies.eviction._hit_density import AFTER, NOWHERE, TAIL, kind_of_new
from kvtier.policies.eviction._lhd_history import Cohort, History

__all__ = ["HedgedLhd"]

_CLEARLY: Final = 0.7
"""Victims come from another class if its density is below this share of the oldest chunk's."""


class HedgedLhd(Eviction):
    """Evicts by lowest hit density; once the regret budget is spent, evicts as LRU would.

    ``copy.policy`` is the cohort that holds the copy, ``copy.queued`` its index in that cohort.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._history = History(capacity)
        self._moves = MoveBatch(self._history)
        self._victims = Victims(capacity, self._history)
        self._span = self._history.span
        self._backoff = 0

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        key, moves = copy.key, self._moves
        came_from = self._history.pop_ghost(key)
        if came_from is not None:
            if came_from is not moves.returning or len(moves.order) >= self._span:
                moves.flush()
                moves.begin(copy, None, came_from, AFTER[came_from.kind])
        elif key == moves.expected_key and moves.is_prompt and len(moves.order) < self._span:
            moves.expected_key = copy.parent
        else:
            self._begin_new(copy)
        order = moves.order
        copy.policy = self._history.newest
        copy.queued = len(order)
        order.append(copy)

    @override
    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        is_downwards = len(copies) > 1 and copies[1].parent == copies[0].key
        way = copies[::-1] if is_downwards else copies
        keys = [copy.key for copy in way]
        parents = [copy.parent for copy in way]
        is_chain = keys[1:] == parents[:-1]
        if is_chain:
            copies = way
        is_known = is_chain or any(parents)
        if is_known and not is_chain:
            copies = _leaf_to_root(copies)
        if self._history.has_ghost(keys) or (is_known and not is_chain):
            followed = {*parents}
            for copy in copies:
                if copy.key in followed:  # other prompts' chunks may be in between
                    self._moves.expected_key = copy.key
                self.on_insert(copy, ctx)
        elif is_chain:
            self._insert_prompt(copies, keys, parents)
        else:
            self._insert_apart(copies)

    @override
    def on_stay(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._stop()
        self._history.record_stayed(copy)

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        source: Cohort = copy.policy
        moves = self._moves
        if source is not moves.source or len(moves.order) >= self._span:
            self._begin(copy, source, AFTER[source.kind])
        order = moves.order
        source.copies[copy.queued] = None
        copy.policy = self._history.newest
        copy.queued = len(order)
        order.append(copy)

    @override
    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        moves, history, span = self._moves, self._history, self._span
        source, order, newest = moves.source, moves.order, history.newest
        place = len(order)
        for copy in copies:
            if copy.policy is not source or place >= span:
                source = copy.policy
                self._begin(copy, source, AFTER[source.kind])
                order, newest = moves.order, history.newest
                place = len(order)
            source.copies[copy.queued] = None
            copy.policy = newest
            copy.queued = place
            order.append(copy)
            place += 1

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        self._stop()
        self._history.record_removed(copy)
        copy.policy = None

    @override
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        victims = self._victims
        if not victims.selected and not self._select():
            return None
        copy = victims.selected.pop()
        if evictable(copy):
            self._history.ghosts[copy.key] = victims.cohort
            return copy
        return self._search(copy, evictable)

    @override
    def pick_many(
        self, count: int, evictable: Evictable, ctx: PolicyContext
    ) -> list[ChunkCopy]:
        picked: list[ChunkCopy] = []
        victims = self._victims
        while (left := count - len(picked)) > 0:
            if not victims.selected and not self._select():
                break
            cohort, ghosts = victims.cohort, self._history.ghosts
            going = victims.next(left)
            for copy in going:
                if not evictable(copy):
                    break
                ghosts[copy.key] = cohort
            else:
                picked += going
                continue
            picked += victims.return_rest(going, copy)
            victim = self._search(copy, evictable)
            if victim is None:
                break
            picked.append(victim)
        return picked

    def _insert_prompt(
        self,
        copies: Sequence[ChunkCopy],
        keys: Sequence[ChunkKey],
        parents: Sequence[ChunkKey | None],
    ) -> None:
        """Insert the new chunks of one prompt, leaf to root."""
        moves, history = self._moves, self._history
        at = 0
        if len(copies) > 1 and keys[0] != moves.expected_key and history.newest.kind != TAIL:
            moves.flush()
            moves.begin_prompt(copies[0], copies[1])
            moves.expected_key = keys[1]
            at = 1
        while at < len(copies):
            room = self._span - len(moves.order)
            if keys[at] != moves.expected_key or not moves.is_prompt or not room:
                self._begin_new(copies[at])
                room = self._span - len(moves.order)
            part = copies[at : at + (room if moves.is_prompt else 1)]
            self._append(part)
            at += len(part)
            moves.expected_key = parents[at - 1]

    def _insert_apart(self, copies: Sequence[ChunkCopy]) -> None:
        """Insert new chunks whose prompts are unknown, for example after a restart."""
        moves = self._moves
        at = 0
        while at < len(copies):
            self._begin_new(copies[at])
            part = copies[at : at + self._span - len(moves.order)]
            moves.add_tails(part[1:])
            self._append(part)
            at += len(part)

    def _append(self, copies: Sequence[ChunkCopy]) -> None:
        """Append ``copies`` to the newest cohort, which has room for them."""
        cohort = self._history.newest
        for place, copy in enumerate(copies, len(cohort.copies)):
            copy.policy = cohort
            copy.queued = place
        cohort.copies += copies

    def _begin_new(self, copy: ChunkCopy) -> None:
        """Begin a batch with the new ``copy``.

        A prompt's last chunk joins the batch of last chunks if one is open.
        """
        moves = self._moves
        kind = moves.classify(copy)
        if kind == TAIL and moves.continues_tails(copy):
            return
        self._begin(copy, self._history.outside, kind)
        moves.is_prompt = kind != TAIL

    def _begin(self, copy: ChunkCopy, source: Cohort, kind: int) -> None:
        """Begin a batch of copies that move from ``source`` to class ``kind``."""
        self._moves.flush()
        if source is self._victims.cohort:
            self._victims.recall()
        self._moves.begin(copy, source, None, kind)

    def _flush(self) -> None:
        """Record the copies that left or moved since the last call."""
        self._victims.flush()
        self._moves.flush()

    def _stop(self) -> None:
        """End the batch of moves and return the selected victims to their cohort."""
        self._moves.flush()
        self._moves.stop()
        self._victims.recall()

    def _select(self) -> bool:
        """Select the next victims; return whether there are any."""
        if self._backoff:
            self._backoff -= 1
            self._stop()
        else:
            self._flush()
        victims, moves = self._victims, self._moves
        victims.choose(by_age=self._backoff > 0)
        if victims.cohort is moves.source or victims.cohort is moves.returning:
            moves.stop()
        return bool(victims.selected)

    def _search(self, refused: ChunkCopy, evictable: Evictable) -> ChunkCopy | None:
        """Evict the oldest evictable copy instead of ``refused``; return the victim or None."""
        self._victims.selected.append(refused)
        self._stop()
        passed: list[ChunkCopy] = []
        for copy in self._history.timeline.by_age():
            if copy is refused:
                continue
            if evictable(copy):
                break
            passed.append(copy)
        else:
            return None
        history = self._history
        history.record_spared(refused)
        history.drop_older_ghosts()
        for spared in passed:
            history.record_spared(spared)
        self._backoff += 1 + len(passed)
        self._victims.select(copy.policy, 1)
        victim = self._victims.selected.pop()
        history.ghosts[victim.key] = self._victims.cohort
        return victim


def _leaf_to_root(copies: Sequence[ChunkCopy]) -> Sequence[ChunkCopy]:
    """Return ``copies`` with every prompt and KV cache group in order from leaf to root.

    On entry all prompts are leaf to root, or all are root to leaf. Depths rise or fall within a
    prompt. Between prompts they may do either, so the majority decides.
    """
    depths = [copy.depth for copy in copies]
    rises, falls = (sum(map(than, depths, depths[1:])) for than in (lt, gt))
    return copies[::-1] if rises > falls else copies


class MoveBatch:
    """Moves of copies to the newest cohort that are recorded together.

    All copies of a batch come from one cohort, or from outside the tier. A prompt's chunks come
    leaf to root. Each move costs a few attribute writes; :meth:`flush` records all moves.

    The first new chunk is the last chunk of its prompt, so its depth gives the prompt's length.
    Last chunks have a separate class, and a batch of last chunks continues across prompts.

    Args:
        history: Where the moves are recorded.

    Attributes:
        source: The copies' last cohort, or the cohort that stands for new chunks; None for
            chunks that were evicted earlier, and between batches.
        returning: The cohort that remembers the keys of chunks that were evicted earlier; None
            for other chunks.
        order: The copies of the newest cohort.
        expected_key: The parent of the new chunk inserted last.
        is_prompt: Whether the batch consists of a prompt's chunks and ``expected_key`` is next.
    """

    __slots__ = (
        "_deeper",
        "_depth",
        "_flushed",
        "_history",
        "_length",
        "expected_key",
        "is_prompt",
        "order",
        "returning",
        "source",
    )

    def __init__(self, history: History) -> None:
        self._history = history
        self.source: Cohort | None = None
        self.returning: Cohort | None = None
        self.order = history.newest.copies
        self.expected_key: ChunkKey | None = None
        self.is_prompt = False
        self._flushed = 0
        self._depth = 0
        self._deeper = 0
        self._length = 0

    def stop(self) -> None:
        """End the batch; the caller has already flushed the batch."""
        self.source = self.returning = None
        self.is_prompt = False

    def flush(self) -> None:
        """Record the copies that moved since the last call."""
        history = self._history
        count = len(self.order) - self._flushed
        if not count:
            return
        source, returning = self.source, self.returning
        if source is None and returning is None:
            return
        self._flushed += count
        history.record_uses(count, count * (self._depth + 1) + self._deeper)
        self._deeper = 0
        if source is not None:
            history.record_hits(source, count)
        elif returning is not None:
            history.record_returns(returning, count)

    def begin(
        self, copy: ChunkCopy, source: Cohort | None, returning: Cohort | None, kind: int
    ) -> None:
        """Begin a batch with ``copy``. The caller has flushed the previous batch.

        Args:
            copy: The first copy of the batch.
            source: As for the attribute.
            returning: As for the attribute.
            kind: The copies' new class.
        """
        self.source, self.returning = source, returning
        history = self._history
        cohort = history.newest
        if cohort.kind != kind or len(cohort.copies) >= history.span:
            cohort = history.open(kind)
        self.is_prompt = False
        self.order = cohort.copies
        self._flushed = len(cohort.copies)
        self._depth = copy.depth

    def begin_prompt(self, last: ChunkCopy, before: ChunkCopy) -> None:
        """Put ``last``, a prompt's last chunk, in a new cohort; begin a batch for the others.

        Before the call, the previous batch must be flushed, and the newest cohort must not hold
        last chunks. ``before`` is the parent of ``last``; the caller inserts it next.
        """
        history = self._history
        cohort = last.policy = history.open(TAIL)
        last.queued = 0
        cohort.copies.append(last)
        self._length = length = last.depth + 1
        history.record_uses(1, length)
        history.record_hits(history.outside, 1)
        self.source, self.returning = history.outside, None
        self.order = history.open(kind_of_new(length)).copies
        self._flushed = 0
        self._depth = before.depth
        self.is_prompt = True

    def classify(self, copy: ChunkCopy) -> int:
        """Return the class of the new ``copy``; the next new copy may be its parent."""
        continues = copy.key == self.expected_key
        self.expected_key = copy.parent
        if continues:
            return kind_of_new(self._length)
        self._length = copy.depth + 1
        return TAIL

    def continues_tails(self, copy: ChunkCopy) -> bool:
        """Return whether ``copy`` fits in the batch of last chunks; if so, count ``copy``."""
        history = self._history
        if (
            history.newest.kind != TAIL
            or self.source is not history.outside
            or len(self.order) >= history.span
        ):
            return False
        self._deeper += copy.depth - self._depth
        return True

    def add_tails(self, copies: Sequence[ChunkCopy]) -> None:
        """Add ``copies``, all last chunks of prompts, to the counts of the current batch."""
        self._deeper += sum(copy.depth for copy in copies) - len(copies) * self._depth


class Victims:
    """Selects the next victims.

    Victims come from the class whose oldest chunk has the lowest hit density. Within a class
    the order is LRU, so only the oldest chunks of the classes are compared. Without budget, or
    where the classes differ by little (:data:`_CLEARLY`), the victims are exactly LRU's.

    A selection is expensive, so each selects as many copies of a cohort as the budget allows.
    Later picks evict these copies. If a copy of the cohort is used, or another event could
    change the selection, the remaining copies return to the cohort.

    Args:
        capacity: Slots of the tier.
        history: The members.

    Attributes:
        selected: The next victims, all of one cohort; the last entry is evicted first.
        cohort: The cohort of the selected copies.
    """

    __slots__ = ("_capacity", "_history", "_unrecorded", "cohort", "selected")

    def __init__(self, capacity: int, history: History) -> None:
        self._capacity = capacity
        self._history = history
        self.cohort = Cohort(NOWHERE, 0)
        self.selected: list[ChunkCopy] = []
        self._unrecorded = 0

    def flush(self) -> None:
        """Record the eviction of the selected copies that were picked since the last call."""
        picked = self._unrecorded - len(self.selected)
        if picked:
            self._unrecorded -= picked
            self._history.record_evicted(self.cohort, picked)

    def next(self, count: int) -> list[ChunkCopy]:
        """Remove and return up to ``count`` selected copies, the next victim first."""
        selected = self.selected
        taken = selected[-count:]
        del selected[-count:]
        taken.reverse()
        return taken

    def return_rest(self, taken: list[ChunkCopy], refused: ChunkCopy) -> list[ChunkCopy]:
        """Return the copies before ``refused``; select the copies after ``refused`` again."""
        place = taken.index(refused)
        self.selected += taken[:place:-1]
        return taken[:place]

    def recall(self) -> None:
        """Record the picked copies, and return the other selected copies to their cohort."""
        self.flush()
        selected, cohort = self.selected, self.cohort
        if selected:
            cohort.first = selected[-1].queued
            for copy in selected:
                cohort.copies[copy.queued] = copy
            selected.clear()
        self._unrecorded = 0

    def choose(self, *, by_age: bool) -> None:
        """Select the next victims. The caller has flushed all batches.

        Args:
            by_age: Whether to select only the oldest copy of the tier.
        """
        history = self._history
        if not history.members:
            return
        history.drop_older_ghosts()
        timeline = history.timeline
        cohort = timeline.oldest()
        count = 1 if by_age else cohort.live
        if not by_age:
            budget = history.regret_budget.limit - timeline.early_evictions
            if budget > 0.0 or cohort.beyond:
                worst = self._worst(cohort)
                if worst is not cohort and (worst.beyond or budget > 0.0):
                    cohort, count = worst, worst.live
                    if not cohort.beyond:
                        count = min(count, ceil(budget))
        self.select(cohort, min(count, self._capacity - len(history.ghosts)))

    def select(self, cohort: Cohort, count: int) -> None:
        """Select up to ``count`` of the oldest copies of ``cohort`` as the next victims."""
        self.cohort = cohort
        self.selected = cohort.take(count)
        self._unrecorded = len(self.selected)

    def _worst(self, oldest: Cohort) -> Cohort:
        """Return the cohort with the lowest density, or ``oldest`` if none is clearly lower."""
        history = self._history
        clock, newest = history.clock, history.newest
        table, lowest = history.density.table, history.density.lowest
        worst = oldest
        least = _CLEARLY * table[worst.kind][(clock - worst.since).bit_length()]
        for kind, queue in enumerate(history.queues):
            while queue and lowest[kind] < least:
                cohort = queue[0]
                if cohort.live:
                    worth = table[kind][(clock - cohort.since).bit_length()]
                    if worth < least:
                        worst, least = cohort, worth
                    break
                if cohort is newest:
                    break
                queue.popleft()
        return worst
