"""Picking a victim when some may not go, the same for every policy that has one next victim.

A paper's policy names *the* victim; a tier whose copies are being moved needs the next one
that may go. So a policy only says what it would take, what becomes of a copy that could not
go after all, and what it remembers of one that went. What could not go is held aside until a
victim is found, hence nobody is asked for twice in one pick, and is then spared: put where
the policy puts what was just used.

That keeps scans O(1) amortised where there is one order to go round. A policy with two, one
of newcomers and one of chunks that proved themselves, may want its victims from the second
while all of it is pinned, and would ask all of it at every pick. What could not go is spared
to the second order, so for as many picks as there were it is left alone: ``_shy`` counts them
down, and while it is not zero victims come from among the newcomers, if there are any.
"""

from __future__ import annotations

from abc import abstractmethod

from typing_extensions import override

from kvtier.policies.base import ChunkCopy, Evictable, Eviction, PolicyContext

__all__ = ["TakingEviction"]


class TakingEviction(Eviction):
    """An eviction policy that is asked for one victim after the other."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._shy = 0

    @abstractmethod
    def _take(self) -> ChunkCopy | None:
        """Remove the next victim from the order and return it; None when nobody is left."""

    @abstractmethod
    def _spare(self, copy: ChunkCopy) -> None:
        """Make a taken ``copy`` a member again, as if just used."""

    def _remember(self, copy: ChunkCopy) -> None:
        """Note that a taken ``copy`` is gone for good."""

    @override
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        if self._shy:
            self._shy -= 1
        victim = self._take()
        if victim is None:
            return None
        if evictable(victim):
            self._remember(victim)
            return victim
        spared = [victim]
        while (victim := self._take()) is not None:
            if evictable(victim):
                self._remember(victim)
                break
            spared.append(victim)
        self._shy = len(spared)
        for copy in spared:
            self._spare(copy)
        return victim
