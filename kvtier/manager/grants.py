"""What is kept in RAM for requests until they load it, and who waits for what of it.

A promotion that nobody protects is evicted by the next one. So whatever a waiting request is
to load is *granted* to it: pinned, whether it is whole or still on its way. A chunk may be kept
for many requests, each of which pins it and is told when it is whole or will not be in time.
A request whose chunks have all arrived or failed is *settled*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TypeAlias

from kvtier.manager.ladder import Ladder
from kvtier.manager.requests import Phase, RequestState
from kvtier.policies import ChunkCopy, CopyState

__all__ = ["Grants"]

_RESIDENT = CopyState.RESIDENT
_Waiters: TypeAlias = tuple[RequestState, ...]


class Grants:
    """The RAM copies that are kept for requests.

    Attributes:
        granted: RAM slots held for waiting requests.
        streaming: RAM slots of chunks that loads in flight brought up; of the same budget.
        waiting: Requests some of whose chunks are on their way.
        settled: Requests that are kept all that they will be.
        changes: Counts what was kept or given back: while it stands still, so does what each
            slot is held for.
    """

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self._ram = ladder.ram
        self._waiters: dict[ChunkCopy, _Waiters] = {}
        self.waiting: dict[RequestState, None] = {}
        self.settled: dict[RequestState, None] = {}
        self.granted = 0
        self.streaming = 0
        self.changes = 0

    def keep(self, request: RequestState, copies: Sequence[ChunkCopy]) -> None:
        """Keep ``copies``, whole in RAM or on their way there, for ``request``."""
        self.changes += 1
        coming = []
        for copy in copies:
            if not copy.grants:
                self.granted += 1
            copy.grants += 1
            if copy.state != _RESIDENT:
                coming.append(copy)
        self._ram.pin_many(copies)
        request.granted.update(dict.fromkeys(copies))
        if coming:
            request.pending += len(coming)
            self._rewait(coming, lambda others: (*others, request))

    def keep_coming(self, request: RequestState, copies: Sequence[ChunkCopy]) -> None:
        """Do :meth:`keep` for copies whose promotion was just planned, for this request."""
        self.changes += 1
        for copy in copies:
            copy.grants = 1
            copy.pins += 1
        self.granted += len(copies)
        request.granted.update(dict.fromkeys(copies))
        request.pending += len(copies)
        self._waiters.update(dict.fromkeys(copies, (request,)))

    def await_arrival(self, request: RequestState) -> None:
        """Settle ``request`` once what is kept for it is whole."""
        request.phase = Phase.WAITING
        self.waiting[request] = None
        if not request.pending:
            self._settle_request(request)

    def hand_over(self, request: RequestState, copies: Sequence[ChunkCopy]) -> bool:
        """Let the pins that keep ``copies`` for ``request`` be its load's from now on.

        Returns:
            Whether it was kept exactly these, all whole; if not, nothing changed.
        """
        granted = request.granted
        if len(granted) != len(copies) or request.pending or granted.keys() != set(copies):
            return False
        self.changes += 1
        for copy in copies:
            copy.grants = grants = copy.grants - 1
            if not grants:
                self.granted -= 1
        granted.clear()
        return True

    def give_back(self, request: RequestState, copies: Sequence[ChunkCopy]) -> None:
        """Keep ``copies`` no longer for ``request``."""
        self.changes += 1
        for copy in copies:
            del request.granted[copy]
        if request.pending:
            coming = [copy for copy in copies if copy.state != _RESIDENT]
            request.pending -= len(coming)
            self._rewait(
                coming, lambda others: tuple(each for each in others if each is not request)
            )
        for copy in copies:
            copy.grants -= 1
            if not copy.grants:
                self.granted -= 1
        self._ram.unpin_many(copies)
        self._ladder.drop_passed(copies)

    def take_from_all(self, copy: ChunkCopy) -> None:
        """End the grants of a whole copy that must leave; it will be a miss for everybody."""
        for request in (*self.waiting, *self.settled):
            if copy in request.granted:
                self.give_back(request, (copy,))

    def release(self, request: RequestState) -> None:
        """Keep nothing for ``request``, and tell it nothing more."""
        self.waiting.pop(request, None)
        self.settled.pop(request, None)
        if request.granted:
            self.give_back(request, list(request.granted))
        request.pending = 0

    def settle_missing(self, copy: ChunkCopy) -> None:
        """Tell the requests that wait for ``copy`` that it will not be whole in time."""
        for request in self._waiters.pop(copy, ()):
            request.pending -= 1
            del request.granted[copy]
            if not request.pending and request.phase == Phase.WAITING:
                self._settle_request(request)
        if copy.grants:
            self.changes += 1
            copy.pins -= copy.grants
            copy.grants = 0
            self.granted -= 1

    def settle_arrived(self, copies: Sequence[ChunkCopy]) -> None:
        """Tell the requests that wait for ``copies`` that they are whole."""
        if not self._waiters:
            return
        waiting = list(map(self._waiters.pop, copies, repeat(())))
        if waiting and waiting.count(waiting[0]) == len(waiting):
            self._arrived_for(waiting[0], len(waiting))
            return
        by_id = {id(waiters): waiters for waiters in waiting}
        for each, chunks in Counter(map(id, waiting)).items():
            self._arrived_for(by_id[each], chunks)

    def end_waits(self) -> None:
        """Settle requests that have waited too long for chunks on their way.

        Promotions have deadlines. What has none is a chunk that another request's worker is
        storing: it is acknowledged within a few steps, or the engine is in trouble.
        """
        for request in list(self.waiting):
            request.lookups += 1
            if request.lookups >= self._ladder.limits.max_arrival_steps:
                self._settle_request(request)

    def lapsed(self) -> list[RequestState]:
        """Return the settled requests that nobody has asked about for long."""
        oldest = self._ladder.step - self._ladder.limits.max_idle_grant_steps
        return [request for request in self.settled if request.asked_at < oldest]

    def clear(self) -> None:
        """Forget every grant and who waits; for a reset of the cache."""
        self.waiting.clear()
        self.settled.clear()
        self._waiters.clear()
        self.granted = 0
        self.changes += 1

    def _arrived_for(self, waiters: _Waiters, chunks: int) -> None:
        """Tell ``waiters`` that ``chunks`` of what they wait for are whole."""
        for request in waiters:
            request.pending -= chunks
            if not request.pending and request.phase == Phase.WAITING:
                self._settle_request(request)

    def _settle_request(self, request: RequestState) -> None:
        """Let ``request`` have what is in RAM, and nothing else."""
        request.phase = Phase.SETTLED
        request.asked_at = self._ladder.step
        self.waiting.pop(request, None)
        self.settled[request] = None

    def _rewait(
        self, copies: Sequence[ChunkCopy], change: Callable[[_Waiters], _Waiters]
    ) -> None:
        """Let those wait for ``copies`` that ``change`` makes of those who did.

        Chunks that the same requests wait for share one tuple, and still do afterwards: a chunk
        that many requests wait for costs each of them no more than one that is its alone.
        """
        changed: dict[int, tuple[_Waiters, _Waiters]] = {}
        for copy in copies:
            before = self._waiters.get(copy, ())
            # The old tuple is kept along, so that no other is given its id.
            _, after = changed.get(id(before)) or changed.setdefault(
                id(before), (before, change(before))
            )
            if after:
                self._waiters[copy] = after
            else:
                del self._waiters[copy]
