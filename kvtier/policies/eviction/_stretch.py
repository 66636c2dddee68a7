"""Copies that go the same way one after the other, booked as one.

A prompt's chunks come leaf to root, and many go from one run, or from outside, to the newest
run. As long as they do, each of them costs a few attribute writes. Ages, classes and LRU's
reach are put right when the stretch ends, or when somebody wants to know.

A prompt's chunks that are new stand in the order in which they came, and the first of them
tells how long the prompt is. It is the last chunk of the prompt and of a class of its own; a
stretch of them goes on although their prompts differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.keys import ChunkKey
from kvtier.policies.base import ChunkCopy
from kvtier.policies.eviction._books import Books
from kvtier.policies.eviction._classes import TAIL, kind_of_new
from kvtier.policies.eviction._runs import Run

__all__ = ["Stretch"]


class Stretch:
    """The copies that moved to the newest run since the books were brought up to date.

    Args:
        books: Where they are booked.

    Attributes:
        source: The run they come from, or outside; None if they come from no such.
        returning: The run that remembers them, if they had left.
        order: The copies of the newest run.
        next_new: The parent of the last new chunk.
        is_prompt: Whether a prompt's new chunks go on if ``next_new`` comes.
    """

    __slots__ = (
        "_books",
        "_deeper",
        "_depth",
        "_length",
        "_settled",
        "is_prompt",
        "next_new",
        "order",
        "returning",
        "source",
    )

    def __init__(self, books: Books) -> None:
        self._books = books
        self.source: Run | None = None
        self.returning: Run | None = None
        self.order = books.newest.copies
        self.next_new: ChunkKey | None = None
        self.is_prompt = False
        self._settled = 0
        self._depth = 0
        self._deeper = 0
        self._length = 0

    def stop(self) -> None:
        """Let nobody go on; what moved is settled."""
        self.source = self.returning = None
        self.is_prompt = False

    def settle(self) -> None:
        """Book the copies that moved since the last time."""
        books = self._books
        count = len(self.order) - self._settled
        if not count:
            return
        source, returning = self.source, self.returning
        if source is None and returning is None:
            return
        self._settled += count
        books.note_uses(count, count * (self._depth + 1) + self._deeper)
        self._deeper = 0
        if source is not None:
            books.note_hits(source, count)
        elif returning is not None:
            books.note_returns(returning, count)

    def begin(
        self, copy: ChunkCopy, source: Run | None, returning: Run | None, kind: int
    ) -> None:
        """Make ready for copies that go where ``copy`` goes; what moved before is settled.

        Args:
            copy: The first of them.
            source: The run they come from, or outside.
            returning: Instead, the run that remembers them.
            kind: The class they go to.
        """
        self.source, self.returning = source, returning
        books = self._books
        run = books.newest
        if run.kind != kind or len(run.copies) >= books.span:
            run = books.open(kind)
        self.is_prompt = False
        self.order = run.copies
        self._settled = len(run.copies)
        self._depth = copy.depth

    def begin_prompt(self, last: ChunkCopy, before: ChunkCopy) -> None:
        """Let in the ``last`` chunk of a new prompt; make ready for ``before`` and the rest.

        All that moved earlier is settled, and no run of last chunks is open.
        """
        books = self._books
        run = last.policy = books.open(TAIL)
        last.queued = 0
        run.copies.append(last)
        self._length = length = last.depth + 1
        books.note_uses(1, length)
        books.note_hits(books.outside, 1)
        self.source, self.returning = books.outside, None
        self.order = books.open(kind_of_new(length)).copies
        self._settled = 0
        self._depth = before.depth
        self.is_prompt = True

    def kind_of(self, copy: ChunkCopy) -> int:
        """Return the class of ``copy``, which is new, and expect the next of its prompt."""
        continues = copy.key == self.next_new
        self.next_new = copy.parent
        if continues:
            return kind_of_new(self._length)
        self._length = copy.depth + 1
        return TAIL

    def goes_on_with_tail(self, copy: ChunkCopy) -> bool:
        """Return whether a prompt's last chunk goes the way of the others, and count it in."""
        books = self._books
        if (
            books.newest.kind != TAIL
            or self.source is not books.outside
            or len(self.order) >= books.span
        ):
            return False
        self._deeper += copy.depth - self._depth
        return True

    def count_tails(self, copies: Sequence[ChunkCopy]) -> None:
        """Count in ``copies`` that follow a prompt's last chunk and are such themselves."""
        self._deeper += sum(copy.depth for copy in copies) - len(copies) * self._depth
