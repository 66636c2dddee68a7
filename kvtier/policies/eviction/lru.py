"""Least recently used, as a queue that is tidied lazily.

The textbook structure, a doubly linked list, costs a dozen attribute writes per touch in
Python, and an ``OrderedDict`` hashes every key again and keeps a second table of them. Here a
touch appends the copy to a queue and leaves its older entries where they are; ``copy.queued``
counts these stale ones. An entry met at the old end is the copy's true place only if none is
left, otherwise it is skipped. Every entry is appended once and taken once, so the cost is O(1)
amortised. When stale entries outnumber live ones the queue is rebuilt, which bounds it by
twice the copies.

A request's chunks come, and mostly go, together, so the queue is made for runs of them: two
lists, one to append to and one, reversed, to take from the end of (Hood and Melville,
"Real-time queue operations in pure LISP", 1981, but not in real time). Both take a run in one
call where a deque takes it entry by entry, and most entries need no decision of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, compress
from operator import not_
from typing import Final

from mypy_extensions import mypyc_attr
from typing_extensions import override

from kvtier.policies.base import (
    ChunkCopy,
    Evictable,
    Eviction,
    PolicyContext,
    is_idle,
    is_unpinned,
)

__all__ = ["Lru"]

_SLACK: Final = 64
"""Stale entries tolerated in a tiny tier, where rebuilding would be all it does."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Lru(Eviction):
    """Evicts the copy whose last use is longest ago."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._newer: list[ChunkCopy] = []
        self._older: list[ChunkCopy] = []  # its last entry is the oldest
        self._members = 0

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._members += 1
        copy.queued = 0
        self._newer.append(copy)

    @override
    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        # Nobody wrote to ``queued`` before: what is inserted is new, or was picked.
        self._members += len(copies)
        self._newer += copies

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        copy.queued += 1
        self._newer.append(copy)
        if len(self._newer) + len(self._older) > 2 * self._members + _SLACK:
            self._tidy()

    @override
    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        touched = list(copies)
        for copy in touched:
            copy.queued += 1
        self._newer += touched
        if len(self._newer) + len(self._older) > 2 * self._members + _SLACK:
            self._tidy()

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        copy.queued += 1  # no entry is its place any more
        self._members -= 1
        if len(self._newer) + len(self._older) > 2 * self._members + _SLACK:
            self._tidy()

    @override
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        rejected: list[ChunkCopy] = []
        victim = None
        while self._older or self._turn():
            copy = self._older.pop()
            if copy.queued:
                copy.queued -= 1
            elif evictable(copy):
                self._members -= 1
                victim = copy
                break
            else:
                rejected.append(copy)
        self._newer += rejected
        return victim

    @override
    def pick_many(
        self, count: int, evictable: Evictable, ctx: PolicyContext
    ) -> list[ChunkCopy]:
        victims: list[ChunkCopy] = []
        rejected: list[ChunkCopy] = []
        while (left := count - len(victims)) > 0 and (self._older or self._turn()):
            run = self._older[: -left - 1 : -1]
            del self._older[-left:]
            doubtful = _doubtful(run, evictable)
            if not any(doubtful):
                victims += run
                continue
            for at in compress(range(len(run)), doubtful):
                copy = run[at]
                if copy.queued:
                    copy.queued -= 1
                elif evictable(copy):
                    doubtful[at] = 0
                else:
                    rejected.append(copy)
            victims += compress(run, map(not_, doubtful))
        self._newer += rejected
        self._members -= len(victims)
        return victims

    def order(self) -> list[ChunkCopy]:
        """Return the members, next victim first; looks at every entry."""
        stale: Counter[ChunkCopy] = Counter()
        members: list[ChunkCopy] = []
        for copy in chain(reversed(self._older), self._newer):
            if stale[copy] == copy.queued:
                members.append(copy)
            stale[copy] += 1
        return members

    def _turn(self) -> bool:
        """Begin to take what was appended; return whether there is anything."""
        self._older, self._newer = self._newer, self._older
        self._older.reverse()
        return bool(self._older)

    def _tidy(self) -> None:
        """Drop every entry that is not its copy's place."""
        kept: list[ChunkCopy] = []
        for copy in chain(reversed(self._older), self._newer):
            if copy.queued:
                copy.queued -= 1
            else:
                kept.append(copy)
        self._older.clear()
        self._newer = kept


def _doubtful(run: Sequence[ChunkCopy], evictable: Evictable) -> list[int]:
    """Return for each entry whether it may be stale, or its copy not pass a test.

    The manager's own tests are made here, where they cost no call for each copy.
    """
    if evictable is is_idle:
        return [copy.queued or copy.pins or copy.dirty for copy in run]
    if evictable is is_unpinned:
        return [copy.queued or copy.pins for copy in run]
    return [1] * len(run)
