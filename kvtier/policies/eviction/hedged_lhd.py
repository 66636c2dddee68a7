"""Least hit density, hedged with LRU: evicts what earns its slot least, as far as that pays.

LRU lets every chunk grow equally old. But chunks differ in how likely they come back, and by
how much depends on the traffic. This policy sorts chunks into classes, learns how many hits a
slot earns with each class at each age (:mod:`._hit_density`), and evicts from the class that
earns least.

Recency is hard to beat where sessions continue, and classes mislead when traffic changes. So
the policy departs from LRU only within a budget of what it won and can lose
(:class:`~._lhd_history.RegretBudget`). For that it must know what LRU would hold, which the
order of all last uses tells (:class:`~._lhd_history.Timeline`).

Chunk by chunk that would cost too much, but chunks come and go by prompts. Copies stand in
*runs*, move in batches (:class:`MoveBatch`) and leave in grants (:class:`Victims`), and the
history is updated once per batch and grant. A single chunk costs a few attribute writes.

A copy that must stay is put where a copy goes that was just used. If all of a class were
pinned, each pick would scan all of it. So for as many picks as copies were refused, victims are
chosen by age alone, and each of those picks moves on. If every copy must stay, none is moved.
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
from kvtier.policies.eviction._lhd_history import History, Run

__all__ = ["HedgedLhd"]

_CLEARLY: Final = 0.7
"""A class is evicted from if its density is below this share of the oldest chunk's."""


class HedgedLhd(Eviction):
    """Evicts what is expected to earn the fewest hits, or LRU's victim where that is a risk.

    ``copy.policy`` is the run that holds the copy, ``copy.queued`` its place there.
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
                if copy.key in followed:  # though one of another group came between
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
        source: Run = copy.policy
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
        if not victims.granted and not self._grant():
            return None
        copy = victims.granted.pop()
        if evictable(copy):
            self._history.ghosts[copy.key] = victims.run
            return copy
        return self._search(copy, evictable)

    @override
    def pick_many(
        self, count: int, evictable: Evictable, ctx: PolicyContext
    ) -> list[ChunkCopy]:
        picked: list[ChunkCopy] = []
        victims = self._victims
        while (left := count - len(picked)) > 0:
            if not victims.granted and not self._grant():
                break
            run, ghosts = victims.run, self._history.ghosts
            going = victims.next(left)
            for copy in going:
                if not evictable(copy):
                    break
                ghosts[copy.key] = run
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
        """Insert new chunks of unknown prompts, as after a restart."""
        moves = self._moves
        at = 0
        while at < len(copies):
            self._begin_new(copies[at])
            part = copies[at : at + self._span - len(moves.order)]
            moves.add_tails(part[1:])
            self._append(part)
            at += len(part)

    def _append(self, copies: Sequence[ChunkCopy]) -> None:
        """Append ``copies`` to the newest run, which has room for them."""
        run = self._history.newest
        for place, copy in enumerate(copies, len(run.copies)):
            copy.policy = run
            copy.queued = place
        run.copies += copies

    def _begin_new(self, copy: ChunkCopy) -> None:
        """Begin a batch with the new ``copy``, or continue one of prompts' last chunks."""
        moves = self._moves
        kind = moves.classify(copy)
        if kind == TAIL and moves.continues_tails(copy):
            return
        self._begin(copy, self._history.outside, kind)
        moves.is_prompt = kind != TAIL

    def _begin(self, copy: ChunkCopy, source: Run, kind: int) -> None:
        """Begin a batch of copies that move from ``source`` to class ``kind``."""
        self._moves.flush()
        if source is self._victims.run:
            self._victims.recall()
        self._moves.begin(copy, source, None, kind)

    def _flush(self) -> None:
        """Record the copies that left or moved since the last call."""
        self._victims.flush()
        self._moves.flush()

    def _stop(self) -> None:
        """End the batch of moves and the grant of victims."""
        self._moves.flush()
        self._moves.stop()
        self._victims.recall()

    def _grant(self) -> bool:
        """Grant the next victims; return whether there are any."""
        if self._backoff:
            self._backoff -= 1
            self._stop()
        else:
            self._flush()
        victims, moves = self._victims, self._moves
        victims.choose(by_age=self._backoff > 0)
        if victims.run is moves.source or victims.run is moves.returning:
            moves.stop()
        return bool(victims.granted)

    def _search(self, refused: ChunkCopy, evictable: Evictable) -> ChunkCopy | None:
        """Evict and return the oldest copy that may leave; the granted ``refused`` may not."""
        self._victims.granted.append(refused)
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
        self._victims.grant(copy.policy, 1)
        victim = self._victims.granted.pop()
        history.ghosts[victim.key] = self._victims.run
        return victim


def _leaf_to_root(copies: Sequence[ChunkCopy]) -> Sequence[ChunkCopy]:
    """Return ``copies`` of several prompts or KV cache groups, each leaf to root.

    They are all leaf to root, or all root to leaf. The depth jumps between two prompts, so most
    steps decide.
    """
    depths = [copy.depth for copy in copies]
    rises, falls = (sum(map(than, depths, depths[1:])) for than in (lt, gt))
    return copies[::-1] if rises > falls else copies


class MoveBatch:
    """Copies that move from one place to the newest run, recorded as one.

    A prompt's chunks come leaf to root, and many move from one run, or from outside, to the
    newest run. Each costs a few attribute writes; :meth:`flush` records them all.

    The first new chunk of a prompt tells its length. It is the last chunk of the prompt and has
    a class of its own; a batch of such chunks continues across prompts.

    Args:
        history: Where the moves are recorded.

    Attributes:
        source: The run the copies come from, or the one for new chunks; else None.
        returning: The run that remembers them, if they had left.
        order: The copies of the newest run.
        expected_key: The parent of the last new chunk.
        is_prompt: Whether a prompt's batch continues with ``expected_key``.
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
        self.source: Run | None = None
        self.returning: Run | None = None
        self.order = history.newest.copies
        self.expected_key: ChunkKey | None = None
        self.is_prompt = False
        self._flushed = 0
        self._depth = 0
        self._deeper = 0
        self._length = 0

    def stop(self) -> None:
        """End the batch, which is flushed."""
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
        self, copy: ChunkCopy, source: Run | None, returning: Run | None, kind: int
    ) -> None:
        """Begin a batch like ``copy``; the batch before is flushed.

        Args:
            copy: Its first copy.
            source: The run the copies come from, or the one for new chunks.
            returning: The run that remembers them, if they had left.
            kind: The class they move to.
        """
        self.source, self.returning = source, returning
        history = self._history
        run = history.newest
        if run.kind != kind or len(run.copies) >= history.span:
            run = history.open(kind)
        self.is_prompt = False
        self.order = run.copies
        self._flushed = len(run.copies)
        self._depth = copy.depth

    def begin_prompt(self, last: ChunkCopy, before: ChunkCopy) -> None:
        """Insert the ``last`` chunk of a new prompt and begin a batch with ``before``.

        The batch before is flushed, and the newest run holds no last chunks.
        """
        history = self._history
        run = last.policy = history.open(TAIL)
        last.queued = 0
        run.copies.append(last)
        self._length = length = last.depth + 1
        history.record_uses(1, length)
        history.record_hits(history.outside, 1)
        self.source, self.returning = history.outside, None
        self.order = history.open(kind_of_new(length)).copies
        self._flushed = 0
        self._depth = before.depth
        self.is_prompt = True

    def classify(self, copy: ChunkCopy) -> int:
        """Return the class of the new ``copy``, and expect its parent next."""
        continues = copy.key == self.expected_key
        self.expected_key = copy.parent
        if continues:
            return kind_of_new(self._length)
        self._length = copy.depth + 1
        return TAIL

    def continues_tails(self, copy: ChunkCopy) -> bool:
        """Add a prompt's last chunk to a batch of such; return False if there is none."""
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
        """Add ``copies``, all last chunks of prompts, to a batch of such."""
        self._deeper += sum(copy.depth for copy in copies) - len(copies) * self._depth


class Victims:
    """Chooses the next victims and grants them to picks.

    Room comes from the class whose oldest chunk has the lowest hit density. Within a class the
    order is LRU, so only the oldest of each are compared. Without budget, or where the classes
    differ by little (:data:`_CLEARLY`), the victims are exactly LRU's.

    A choice is expensive, so it takes as many copies off a run as the budget allows and
    *grants* each to the next pick. A use of the run, or whatever else could change the choice,
    returns the rest.

    Args:
        capacity: Slots of the tier.
        history: The members.

    Attributes:
        granted: Copies of one run that are the next victims, the next one last.
        run: That run.
    """

    __slots__ = ("_capacity", "_history", "_unrecorded", "granted", "run")

    def __init__(self, capacity: int, history: History) -> None:
        self._capacity = capacity
        self._history = history
        self.run = Run(NOWHERE, 0)
        self.granted: list[ChunkCopy] = []
        self._unrecorded = 0

    def flush(self) -> None:
        """Record the granted copies that were picked."""
        picked = self._unrecorded - len(self.granted)
        if picked:
            self._unrecorded -= picked
            self._history.record_evicted(self.run, picked)

    def next(self, count: int) -> list[ChunkCopy]:
        """Take up to ``count`` granted copies, the next victim first."""
        granted = self.granted
        taken = granted[-count:]
        del granted[-count:]
        taken.reverse()
        return taken

    def return_rest(self, taken: list[ChunkCopy], refused: ChunkCopy) -> list[ChunkCopy]:
        """Grant the copies after ``refused`` in ``taken`` again; return those before it."""
        place = taken.index(refused)
        self.granted += taken[:place:-1]
        return taken[:place]

    def recall(self) -> None:
        """Return the granted copies to their run, and record those that were picked."""
        self.flush()
        granted, run = self.granted, self.run
        if granted:
            run.first = granted[-1].queued
            for copy in granted:
                run.copies[copy.queued] = copy
            granted.clear()
        self._unrecorded = 0

    def choose(self, *, by_age: bool) -> None:
        """Grant the next victims when none are left; everything is flushed.

        Args:
            by_age: Whether to grant only the oldest copy.
        """
        history = self._history
        if not history.members:
            return
        history.drop_older_ghosts()
        timeline = history.timeline
        run = timeline.oldest()
        count = 1 if by_age else run.live
        if not by_age:
            budget = history.regret_budget.limit - timeline.early_evictions
            if budget > 0.0 or run.beyond:
                worst = self._worst(run)
                if worst is not run and (worst.beyond or budget > 0.0):
                    run, count = worst, worst.live
                    if not run.beyond:
                        count = min(count, ceil(budget))
        self.grant(run, min(count, self._capacity - len(history.ghosts)))

    def grant(self, run: Run, count: int) -> None:
        """Grant up to ``count`` of the oldest copies of ``run``."""
        self.run = run
        self.granted = run.take(count)
        self._unrecorded = len(self.granted)

    def _worst(self, oldest: Run) -> Run:
        """Return the run whose slots clearly earn least, or ``oldest``."""
        history = self._history
        clock, newest = history.clock, history.newest
        table, lowest = history.density.table, history.density.lowest
        worst = oldest
        least = _CLEARLY * table[worst.kind][(clock - worst.since).bit_length()]
        for kind, queue in enumerate(history.queues):
            while queue and lowest[kind] < least:
                run = queue[0]
                if run.live:
                    worth = table[kind][(clock - run.since).bit_length()]
                    if worth < least:
                        worst, least = run, worth
                    break
                if run is newest:
                    break
                queue.popleft()
        return worst
