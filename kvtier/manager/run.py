"""Copies that are handled together: the keys and slots of a request's chunks at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvtier.keys import ChunkKey
from kvtier.manager.order import nearest
from kvtier.policies import ChunkCopy

__all__ = ["Run", "without"]


class Run(NamedTuple):
    """Copies of one tier that are handled together, as a request's chunks are.

    Their keys and slots stand beside them because whoever made the run had them at hand, and
    asking every copy again is most of the work that there is. The lists are not changed.

    Attributes:
        copies: The copies.
        keys: Of each.
        slots: Of each.
        departed: What :class:`TierState` counted as that when all of them were there.
    """

    copies: Sequence[ChunkCopy]
    keys: Sequence[ChunkKey]
    slots: Sequence[int]
    departed: int

    def part(self, copies: Sequence[ChunkCopy]) -> Run:
        """Return the run of some of its copies, in their order."""
        if copies == self.copies:
            return self
        keys = [copy.key for copy in copies]
        return Run(copies, keys, [copy.slot for copy in copies], self.departed)

    def cut(self, chunks: int) -> tuple[Run, Run]:
        """Return the first ``chunks`` of them, and the others."""
        copies, keys, slots, departed = self
        return (
            Run(copies[:chunks], keys[:chunks], slots[:chunks], departed),
            Run(copies[chunks:], keys[chunks:], slots[chunks:], departed),
        )

    def head(self, chunks: int) -> Run:
        """Return the run of the first ``chunks`` of one prompt, whatever their group."""
        return self.part([self.copies[at] for at in nearest(self.keys, chunks)])

    @staticmethod
    def join(runs: Sequence[Run]) -> Run:
        """Return one run of all ``runs``, at least one."""
        if len(runs) == 1:
            return runs[0]
        return Run(
            [copy for run in runs for copy in run.copies],
            [key for run in runs for key in run.keys],
            [slot for run in runs for slot in run.slots],
            min(run.departed for run in runs),
        )


def without(copies: Sequence[ChunkCopy], some: Sequence[ChunkCopy]) -> Sequence[ChunkCopy]:
    """Return those of ``copies`` that are not among ``some``, a part of them."""
    if len(some) == len(copies):
        return ()
    if not some:
        return copies
    taken = set(some)
    return [copy for copy in copies if copy not in taken]
