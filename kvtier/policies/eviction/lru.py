"""Evicts the least recently used copy; uses a queue that is cleaned lazily.

In Python, a doubly linked list costs a dozen attribute writes per use, and an ``OrderedDict``
hashes every key again. In this class, a use appends the copy to a queue. The copy's older
entries stay in the queue as stale entries, and ``copy.queued`` counts them. The oldest entry in
the queue is live only if its copy has no stale entries; otherwise the entry is skipped. Every
entry is appended once and removed once, so the cost is O(1) amortised. When stale entries
outnumber live entries, the queue is rebuilt. So the queue has at most two entries per copy.

A request's chunks are inserted together, and usually evicted together. So the queue consists of
two lists: one list for appends, and one reversed list for removals from its end. Python appends
or removes many entries at the end of a list in one call. (Hood and Melville, "Real-time queue
operations in pure LISP", 1981, but not in real time.)

A prompt reaches a tier in batches: the loaded chunks, then the chunks that each step computed.
A chunk is useless without all chunks before it, so the last batch must be evicted first.
Therefore a batch does not enter the queue at once. The batch waits in a list, the *prompt*. A
batch extends the waiting prompt that ends with the parent of the batch's first chunk. A prompt
enters the queue leaf to root in three cases: the queue is empty, too many prompts wait, or a
single chunk is inserted or used. Waiting prompts are in the order of their last use, after all
entries of the queue. So only chunks of the same prompt change their order. Unrelated batches
have the same order as if each chunk were inserted alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress
from operator import not_
from typing import Final

from typing_extensions import override

from kvtier.keys import hash_part
from kvtier.policies.base import (
    ChunkCopy,
    Evictable,
    Eviction,
    PolicyContext,
    is_evictable,
    is_unpinned,
)

__all__ = ["Fifo", "Lru"]

_SLACK: Final = 64
"""Number of stale entries that are always allowed, so that small queues are rarely rebuilt."""
_PROMPTS: Final = 1024
"""Largest number of waiting prompts, about as many as an engine runs at a time."""


class Lru(Eviction):
    """Evicts the least recently used copy. Within a prompt, the deepest chunk goes first."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._newer: list[ChunkCopy] = []
        self._older: list[ChunkCopy] = []  # reversed: the last entry is the oldest
        self._prompts: dict[bytes, list[ChunkCopy]] = {}  # by hash of their last chunk
        self._waiting = 0  # number of entries in the prompts
        self._members = 0

    @override
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        if self._prompts:
            self._end_prompts()
        self._members += 1
        copy.queued = 0
        self._newer.append(copy)

    @override
    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        # ``queued`` is 0: an inserted copy is new, or was picked.
        if copies:
            self._members += len(copies)
            self._extend_prompt(copies)

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        if self._prompts:
            self._end_prompts()
        copy.queued += 1
        self._newer.append(copy)
        self._bound()

    @override
    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        touched = list(copies)
        for copy in touched:
            copy.queued += 1
        if touched:
            self._extend_prompt(touched)
            self._bound()

    @override
    def on_remove(self, copy: ChunkCopy) -> None:
        copy.queued += 1  # all entries of this copy are stale now
        self._members -= 1
        self._bound()

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
        if rejected:
            self._extend_prompt(rejected)
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
        if rejected:
            self._extend_prompt(rejected)
        self._members -= len(victims)
        return victims

    def order(self) -> list[ChunkCopy]:
        """Return the members in order of eviction, in time O(entries)."""
        stale: Counter[ChunkCopy] = Counter()
        members: list[ChunkCopy] = []
        for copy in self._entries():
            if stale[copy] == copy.queued:
                members.append(copy)
            stale[copy] += 1
        return members

    def _entries(self) -> Iterator[ChunkCopy]:
        """Return all entries, oldest first."""
        prompts = chain.from_iterable(map(reversed, self._prompts.values()))
        return chain(reversed(self._older), self._newer, prompts)

    def _extend_prompt(self, copies: Sequence[ChunkCopy]) -> None:
        """Append ``copies``, leaf to root, to the prompt they continue, or to a new prompt."""
        # Chunks of different KV cache groups that end at the same token have the same hash.
        prompts, last = self._prompts, hash_part(copies[0].key)
        before = copies[-1].parent
        prompt = None if before is None else prompts.pop(hash_part(before), None)
        if last in prompts:
            prompt = self._join(prompt, last, copies)
        elif len(prompts) >= _PROMPTS:
            self._newer += reversed(self._take_prompt())
        self._waiting += len(copies)
        if prompt is None:
            prompt = []
        prompt += reversed(copies)
        prompts[last] = prompt

    def _join(
        self, prompt: list[ChunkCopy] | None, last: bytes, copies: Sequence[ChunkCopy]
    ) -> list[ChunkCopy] | None:
        """Join ``prompt`` with the waiting prompt that ends with the leaf of ``copies``.

        Another request has used all chunks of the waiting prompt again.
        """
        if copies[0].parent is None and self._prompts[last] != copies[::-1]:
            self._end_prompts()  # the copies may belong to different prompts
            return prompt
        same = self._prompts.pop(last)
        if prompt is None:
            return same
        return same + prompt if same[0].depth <= prompt[0].depth else prompt + same

    def _take_prompt(self) -> list[ChunkCopy]:
        """Remove the prompt that has waited longest, and return its entries."""
        prompt = self._prompts.pop(next(iter(self._prompts)))
        self._waiting -= len(prompt)
        return prompt

    def _end_prompts(self) -> None:
        """Move all prompts into the queue."""
        for prompt in self._prompts.values():
            self._waiting -= len(prompt)
            self._newer += reversed(prompt)
        self._prompts.clear()

    def _turn(self) -> bool:
        """Refill ``_older``, which is empty; return False if there are no more entries."""
        if self._newer or not self._prompts:
            self._older, self._newer = self._newer, self._older
            self._older.reverse()
        else:
            self._older = self._take_prompt()
        return bool(self._older)

    def _bound(self) -> None:
        """If there are too many stale entries, rebuild the queue without them."""
        entries = len(self._newer) + len(self._older) + self._waiting
        if entries <= 2 * self._members + _SLACK:
            return
        self._newer = _places(chain(reversed(self._older), self._newer))
        self._older.clear()
        self._waiting = 0
        for last, prompt in list(self._prompts.items()):
            prompt[:] = _places(reversed(prompt))[::-1]
            self._waiting += len(prompt)
            if not prompt:
                del self._prompts[last]


class Fifo(Lru):
    """Evicts the copy that was inserted first. Uses do not matter."""

    @override
    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        for copy in copies:
            self.on_insert(copy, ctx)

    @override
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        pass

    @override
    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        pass


def _places(entries: Iterable[ChunkCopy]) -> list[ChunkCopy]:
    """Return the live entries, oldest first, and decrement ``queued`` for each stale entry."""
    kept: list[ChunkCopy] = []
    for copy in entries:
        if copy.queued:
            copy.queued -= 1
        else:
            kept.append(copy)
    return kept


def _doubtful(run: Sequence[ChunkCopy], evictable: Evictable) -> list[int]:
    """Return for each entry whether it may be stale or rejected by ``evictable``.

    For the manager's own predicates, this function does not call ``evictable``.
    """
    if evictable is is_evictable:
        return [copy.queued or copy.pins or copy.dirty for copy in run]
    if evictable is is_unpinned:
        return [copy.queued or copy.pins for copy in run]
    return [1] * len(run)
