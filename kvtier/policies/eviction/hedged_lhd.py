"""Least hit density, hedged with LRU: what earns its slot least goes, as far as that pays.

LRU lets everything grow equally old. But chunks differ in how likely they come back, and by how
much depends on the traffic. This policy puts chunks into classes (:mod:`._classes`), learns how
many hits a slot earns with each at each age (:mod:`._hit_density`), and takes room from the one
that earns least (:mod:`._victims`).

Recency is hard to beat where sessions go on, and classes mislead where the past does. So the
policy departs from LRU only as far as a count of what it won and can lose allows
(:mod:`._stake`). For that it must know whom LRU would hold, which the order of all last uses
tells (:mod:`._runs`).

All of it would cost too much chunk by chunk, but chunks come and go by prompts. Copies stand in
*runs* and move in *stretches* (:mod:`._stretch`); victims leave in grants; and the books
(:mod:`._books`) are kept by the stretch and by the grant, for as long as nobody asks. What is
done for a single chunk is a few attribute writes, whatever run it comes from.

A copy that may not go is put where one goes that was just used. Were all of a class pinned,
each pick would go round all of it, so for as many picks as copies were refused victims are
chosen by age alone, and each of those picks moves on. Where nobody may go nobody is moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import gt, lt

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy, Evictable, Eviction, PolicyContext
from kvtier.policies.eviction._books import Books
from kvtier.policies.eviction._classes import AFTER, TAIL
from kvtier.policies.eviction._runs import Run
from kvtier.policies.eviction._stretch import Stretch
from kvtier.policies.eviction._victims import Victims

__all__ = ["HedgedLhd"]


class HedgedLhd(Eviction):
    """Evicts what is expected to earn the fewest hits, LRU's victim where that is a risk.

    ``copy.policy`` is the run that holds the copy, ``copy.queued`` its place there.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._books = Books(capacity)
        self._stretch = Stretch(self._books)
        self._victims = Victims(capacity, self._books)
        self._span = self._books.span
        self._shy = 0

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        key, stretch = copy.key, self._stretch
        came_from = self._books.forget(key)
        if came_from is not None:
            if came_from is not stretch.returning or len(stretch.order) >= self._span:
                stretch.settle()
                stretch.begin(copy, None, came_from, AFTER[came_from.kind])
        elif key == stretch.next_new and stretch.is_prompt and len(stretch.order) < self._span:
            stretch.next_new = copy.parent
        else:
            self._begin_new(copy)
        order = stretch.order
        copy.policy = self._books.newest
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
        if self._books.remembers_any(keys) or (is_known and not is_chain):
            followed = {*parents}
            for copy in copies:
                if copy.key in followed:  # though one of another group came between
                    self._stretch.next_new = copy.key
                self.on_insert(copy, ctx)
        elif is_chain:
            self._insert_prompt(copies, keys, parents)
        else:
            self._insert_apart(copies)

    @override
    def on_stay(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._stop()
        self._books.note_stayed(copy)

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        source: Run = copy.policy
        stretch = self._stretch
        if source is not stretch.source or len(stretch.order) >= self._span:
            self._begin(copy, source, AFTER[source.kind])
        order = stretch.order
        source.copies[copy.queued] = None
        copy.policy = self._books.newest
        copy.queued = len(order)
        order.append(copy)

    @override
    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        stretch, books, span = self._stretch, self._books, self._span
        source, order, newest = stretch.source, stretch.order, books.newest
        place = len(order)
        for copy in copies:
            if copy.policy is not source or place >= span:
                source = copy.policy
                self._begin(copy, source, AFTER[source.kind])
                order, newest = stretch.order, books.newest
                place = len(order)
            source.copies[copy.queued] = None
            copy.policy = newest
            copy.queued = place
            order.append(copy)
            place += 1

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        self._stop()
        self._books.note_removed(copy)
        copy.policy = None

    @override
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        victims = self._victims
        if not victims.granted and not self._grant():
            return None
        copy = victims.granted.pop()
        if evictable(copy):
            self._books.ghosts[copy.key] = victims.run
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
            run, ghosts = victims.run, self._books.ghosts
            going = victims.next(left)
            for copy in going:
                if not evictable(copy):
                    break
                ghosts[copy.key] = run
            else:
                picked += going
                continue
            picked += victims.give_back(going, copy)
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
        """Let in the chunks of one prompt, which are new, leaf to root."""
        stretch, books = self._stretch, self._books
        at = 0
        if len(copies) > 1 and keys[0] != stretch.next_new and books.newest.kind != TAIL:
            stretch.settle()
            stretch.begin_prompt(copies[0], copies[1])
            stretch.next_new = keys[1]
            at = 1
        while at < len(copies):
            room = self._span - len(stretch.order)
            if keys[at] != stretch.next_new or not stretch.is_prompt or not room:
                self._begin_new(copies[at])
                room = self._span - len(stretch.order)
            part = copies[at : at + (room if stretch.is_prompt else 1)]
            self._append(part)
            at += len(part)
            stretch.next_new = parents[at - 1]

    def _insert_apart(self, copies: Sequence[ChunkCopy]) -> None:
        """Let in chunks, which are new, of prompts that nobody knows, as after a restart."""
        stretch = self._stretch
        at = 0
        while at < len(copies):
            self._begin_new(copies[at])
            part = copies[at : at + self._span - len(stretch.order)]
            stretch.count_tails(part[1:])
            self._append(part)
            at += len(part)

    def _append(self, copies: Sequence[ChunkCopy]) -> None:
        """Let ``copies`` stand last in the newest run, which has room for them."""
        run = self._books.newest
        for place, copy in enumerate(copies, len(run.copies)):
            copy.policy = run
            copy.queued = place
        run.copies += copies

    def _begin_new(self, copy: ChunkCopy) -> None:
        """Make ready for ``copy``, which is new, and what goes its way."""
        stretch = self._stretch
        kind = stretch.kind_of(copy)
        if kind == TAIL and stretch.goes_on_with_tail(copy):
            return
        self._begin(copy, self._books.outside, kind)
        stretch.is_prompt = kind != TAIL

    def _begin(self, copy: ChunkCopy, source: Run, kind: int) -> None:
        """Make ready for copies that go, like ``copy``, from ``source`` to class ``kind``."""
        self._stretch.settle()
        if source is self._victims.run:
            self._victims.recall()
        self._stretch.begin(copy, source, None, kind)

    def _settle(self) -> None:
        """Book the copies that left or moved since the last time."""
        self._victims.settle()
        self._stretch.settle()

    def _stop(self) -> None:
        """Let neither what leaves nor what moves go on as it does."""
        self._stretch.settle()
        self._stretch.stop()
        self._victims.recall()

    def _grant(self) -> bool:
        """Grant the next victims, if there are any; return whether there are."""
        if self._shy:
            self._shy -= 1
            self._stop()
        else:
            self._settle()
        victims, stretch = self._victims, self._stretch
        victims.choose(by_age=self._shy > 0)
        if victims.run is stretch.source or victims.run is stretch.returning:
            stretch.stop()
        return bool(victims.granted)

    def _search(self, refused: ChunkCopy, evictable: Evictable) -> ChunkCopy | None:
        """Return the oldest copy that may go; ``refused``, which was granted, may not."""
        self._victims.granted.append(refused)
        self._stop()
        passed: list[ChunkCopy] = []
        for copy in self._books.timeline.by_age():
            if copy is refused:
                continue
            if evictable(copy):
                break
            passed.append(copy)
        else:
            return None
        books = self._books
        books.note_spared(refused)
        books.forget_older_half()
        for spared in passed:
            books.note_spared(spared)
        self._shy += 1 + len(passed)
        self._victims.grant(copy.policy, 1)
        victim = self._victims.granted.pop()
        books.ghosts[victim.key] = self._victims.run
        return victim


def _leaf_to_root(copies: Sequence[ChunkCopy]) -> Sequence[ChunkCopy]:
    """Return ``copies`` of several prompts or KV cache groups, each of them leaf to root.

    They came so or the other way round. Where one ends and the next begins the depth jumps, so
    the way is that of most steps.
    """
    depths = [copy.depth for copy in copies]
    rises, falls = (sum(map(than, depths, depths[1:])) for than in (lt, gt))
    return copies[::-1] if rises > falls else copies
