"""Answers requests that ask which of their chunks can be loaded.

A request asks once: while it does, it is told what every tier has, and what it finds is noted
with the :class:`~kvtier.manager.promoter.Promoter`. While chunks are brought up for it, it is
put off in as few calls as its engine allows. Once it is settled, it is told what RAM has.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvtier.keys import GROUP_NBYTES, ChunkKey
from kvtier.manager.ladder import Ladder, first_whole
from kvtier.manager.plans import Lookup
from kvtier.manager.promises import Promises
from kvtier.manager.promoter import Promoter
from kvtier.manager.requests import DEFERRED, Phase, RequestState
from kvtier.policies import ChunkCopy, CopyState

__all__ = ["Answers"]

_RESIDENT = CopyState.RESIDENT
_ASKING = Phase.ASKING
_SETTLED = Phase.SETTLED
_HIT = Lookup.HIT
_MISS = Lookup.MISS
_PENDING = Lookup.PENDING
_OPENING = (Lookup.RETRY, Lookup.MISS)
"""What the first keys of a KV cache group are answered while their request waits."""


class Answers:
    """Says of chunks whether a request can load them now, later or not at all."""

    def __init__(self, ladder: Ladder, promoter: Promoter, promises: Promises) -> None:
        self._ladder = ladder
        self._ram = ladder.ram
        self._resident = ladder.ram.copies
        self._promoter = promoter
        self._promises = promises

    def one(self, request: RequestState, key: ChunkKey) -> Lookup:
        """Do :meth:`TieredOffloadingManager.lookup`."""
        phase = request.phase
        if phase != _ASKING:
            if phase != _SETTLED:
                return self._put_off(request, key)
            request.asked_at = self._ladder.step
        within = request.terms.load_tiers
        if within is not None and not self._ladder.held_within(key, within):
            return _MISS
        copy = self._resident.get(key)
        if copy is None or copy.state != _RESIDENT:
            return self._look_below(request, copy, key)
        if self._ram.leaving:
            self._ram.stay(copy, self._ladder.ctx)
        if phase == _ASKING:
            self._promoter.note(request, key)
            if self._promises.last_to is request and self._promises.has_too_many(request):
                request.wanting = True  # it waits its turn instead, for all of it
                return _PENDING
        return _HIT

    def lead(self, request: RequestState, keys: Sequence[ChunkKey]) -> int | None:
        """Do :meth:`TieredOffloadingManager.lookup_prefix`."""
        phase = request.phase
        if phase in DEFERRED:
            return None if keys else 0
        if phase == Phase.FAILED or not self._is_plain(request):
            return self._look_on(request, keys, 0)
        hits = self._ram.lead(keys, self._ladder.ctx)
        if phase == _ASKING:
            return self._ask(request, keys, hits)
        request.asked_at = self._ladder.step
        if hits < len(keys):
            self._count_miss(request)
        return hits

    def _is_plain(self, request: RequestState) -> bool:
        """Return whether every tier counts for ``request``, and no slot is promised to it."""
        ladder = self._ladder
        if ladder.out_of_service or request.terms.load_tiers is not None:
            return False
        return not (ladder.limits.streams and request.asked)

    def _ask(self, request: RequestState, keys: Sequence[ChunkKey], hits: int) -> int | None:
        """Note what of ``keys``, of which ``hits`` lead, a request asks for the first time."""
        if hits:
            self._promoter.note_many(request, keys[:hits])
        if hits == len(keys):
            return hits
        below = self._ladder.lead_below(keys[hits:])
        found = hits + len(below)
        deferred = False
        if below:
            if not self._promises.make_all(request, below):
                if self._ladder.limits.streams:  # a part of them can be promised
                    return self._look_on(request, keys, hits)
                deferred = request.wanting = True
            self._promoter.note_many(request, keys[hits:found])
        if self._ladder.holds_any(keys[found : found + 1]):
            # What is in RAM behind that, or on its way there, is found one by one.
            more = self._look_on(request, keys, found)
            return None if deferred else more
        if found < len(keys):
            self._ladder.asked(keys[found])
            self._count_miss(request)
        return None if deferred else found

    def _look_on(
        self, request: RequestState, keys: Sequence[ChunkKey], found: int
    ) -> int | None:
        """Do :meth:`lead` one by one, from the first of ``keys`` not yet found on."""
        deferred = False
        for key in islice(keys, found, None):
            answer = self.one(request, key)
            if answer is _MISS:
                break
            deferred = deferred or answer is not _HIT
            found += 1
        return None if deferred else found

    def _look_below(
        self, request: RequestState, copy: ChunkCopy | None, key: ChunkKey
    ) -> Lookup:
        """Answer for a chunk that is not whole in RAM."""
        if request.phase == _ASKING:
            self._ladder.asked(key)
            if copy is None:
                readable = self._ladder.readable(request.terms.load_tiers)
                found = first_whole(readable, key)
                if found is not None:
                    promised = self._promises.make(request, key, found[0])
                    self._promoter.note(request, key)
                    if promised:
                        return _HIT
                    request.wanting = True
                    return _PENDING
            elif copy.state == CopyState.WRITING:
                self._promoter.note(request, key)
                request.wanting = True
                return _PENDING
        self._count_miss(request)
        return _MISS

    def _put_off(self, request: RequestState, key: ChunkKey) -> Lookup:
        """Answer a request that waits or failed, in as few calls as its engine allows.

        A RETRY makes the engine ask again next step, and a MISS ends the scan of a prefix; but
        a KV cache group that answers only MISS would end the whole lookup, so each group's scan
        is opened with a RETRY. Who goes on behind the MISS looks for a window: PENDING is part
        of one, and as many as it is long end the scan.
        """
        if request.phase == Phase.FAILED:
            return _MISS
        if request.deferred_at != self._ladder.step:
            # The engine may have computed more of the prefix and open with another key.
            request.deferred.clear()
            request.deferred_at = self._ladder.step
        group = key[-GROUP_NBYTES:]
        opening = request.deferred.setdefault(group, [])
        if len(opening) < len(_OPENING) and key not in opening:
            opening.append(key)
        return _OPENING[opening.index(key)] if key in opening else _PENDING

    def _count_miss(self, request: RequestState) -> None:
        if not request.missed:
            request.missed = True
            for tier in self._ladder.tiers:
                tier.counters.misses += 1
