"""Brings chunks up for requests that are about to start.

The engine asks for a waiting request's chunks one by one, at every step, until it is
scheduled. What is found in a slower tier must be in RAM before the request may count on it,
and must stay there until the request loads it: a promotion that nobody protects is evicted by
the next one, and a prefix larger than RAM is then promoted for ever while the request never
runs. So:

* A request asks once. Its answers for that step are noted; at the end of the step everything it
  found is *granted* as a whole: resident copies are pinned for it, missing ones are brought up
  into slots pinned for it.
* Grants are bounded by a budget. A request that fits the budget but not what is left of it
  waits its turn, first come first served, for a bounded number of steps and seconds. One that
  could never fit, or that waited too long, is granted the head of its prefix that fits; the
  rest is recomputed. Of several KV cache groups nothing is brought up then: without the chunks
  of one, those of the others are of no use.
* When all its chunks have arrived or failed the request is *settled*: what is in RAM is a
  hit, all else a miss, whatever the slower tiers hold. So every request is answered within a
  bounded number of lookups.
* The grant ends when the request's load is planned (which pins for itself), or when the request
  starts without, is preempted or ends. It lapses when nobody has asked for the request for a
  bounded number of steps: the engine may have forgotten it without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, repeat
from typing import TypeAlias

from kvtier.keys import GROUP_NBYTES, ChunkKey
from kvtier.manager.found import Found, survey
from kvtier.manager.ladder import Ladder
from kvtier.manager.ledger import JobRecord
from kvtier.manager.plans import Lookup
from kvtier.manager.requests import Phase, RequestState
from kvtier.manager.rising import plan_rise
from kvtier.manager.worth import LoadChoice
from kvtier.policies import ChunkCopy, CopyState
from kvtier.types import Outcome, TransferResult

__all__ = ["Promoter"]

_RESIDENT = CopyState.RESIDENT
_DONE = Outcome.DONE
_Waiters: TypeAlias = tuple[RequestState, ...]


class Promoter:
    """Grants chunks to waiting requests and plans the promotions that takes.

    Attributes:
        granted: RAM slots held for waiting requests.
        streaming: RAM slots of chunks that loads in flight brought up; of the same budget.
        step: Scheduling steps so far.
    """

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self._ram = ladder.ram
        self._asking: dict[RequestState, None] = {}
        self._queue: dict[RequestState, None] = {}
        self._waiting: dict[RequestState, None] = {}
        self._settled: dict[RequestState, None] = {}
        self._waiters: dict[ChunkCopy, _Waiters] = {}
        self.step = 0
        self.granted = 0
        self.streaming = 0

    def asked_for(self) -> Iterable[RequestState]:
        """Return the requests that found something in this step and were not granted it yet."""
        return self._asking

    def note(self, request: RequestState, key: ChunkKey) -> None:
        """Note that ``request`` found ``key`` somewhere."""
        asked = request.asked
        if not asked:
            self._asking[request] = None
        asked[key] = None

    def note_many(self, request: RequestState, keys: Iterable[ChunkKey]) -> None:
        """Do :meth:`note` for ``keys``, at least one."""
        self._asking[request] = None
        noted = dict.fromkeys(keys)
        if request.asked:
            request.asked.update(noted)
        else:
            request.asked = noted

    def defer(self, request: RequestState, key: ChunkKey) -> Lookup:
        """Answer a request that waits, in as few calls as its engine allows.

        A RETRY makes the engine ask again next step, and a MISS ends its scan; but a KV cache
        group that answers only MISS would end the whole lookup, so each group's scan is opened
        with a RETRY.
        """
        if request.deferred_at != self.step:
            # The engine may have computed more of the prefix and open with another key.
            request.deferred.clear()
            request.deferred_at = self.step
        group = key[-GROUP_NBYTES:]
        opened = request.deferred.setdefault(group, key)
        return Lookup.RETRY if opened == key else Lookup.MISS

    def end_step(self) -> None:
        """Grant what this step's requests asked for, first come first served."""
        self.step += 1
        if self._asking:
            self._queue_up()
        if self._waiting:
            self._give_up()
        if self._settled:
            self._let_lapse()
        if self._queue:
            self._serve()

    def _queue_up(self) -> None:
        """Let the requests that want something brought up wait for their turn."""
        for request in self._asking:
            if request.wanting:
                request.phase = Phase.QUEUED
                request.queued_s = self._ladder.ctx.now
                self._queue[request] = None
            else:
                request.asked.clear()
        self._asking.clear()

    def _serve(self) -> None:
        """Grant what those in the queue asked for, as far as the budget goes."""
        blocked = False
        limits, now = self._ladder.limits, self._ladder.ctx.now
        for request in list(self._queue):
            request.lookups += 1
            # Neither alone says how long a wait is: an engine that computes takes tens of
            # milliseconds for a step, an idle one takes a thousand steps a second.
            patient = (
                request.lookups < limits.patience_lookups
                or now - request.queued_s < limits.patience_s
            )
            if blocked and patient:
                continue
            if self._start(request, whole=patient):
                del self._queue[request]
            else:
                blocked = True

    def release(self, request: RequestState) -> None:
        """End whatever is kept or planned for ``request``; it may ask afresh afterwards."""
        if request.phase == Phase.ASKING and not request.asked:
            return
        self._asking.pop(request, None)
        self._queue.pop(request, None)
        self._waiting.pop(request, None)
        self._settled.pop(request, None)
        if request.granted:
            self._take_back(request)
        for job_id in request.jobs:
            record = self._ladder.ledger.find(job_id)
            if record is not None and not any(copy.grants for copy in record.destinations):
                self._ladder.ledger.cancel(job_id)
        request.jobs.clear()
        request.asked.clear()
        request.deferred.clear()
        request.wanting = False
        request.pending = 0
        request.lookups = 0
        if request.phase != Phase.FAILED:
            request.phase = Phase.ASKING

    def hand_over(self, request: RequestState, copies: Sequence[ChunkCopy]) -> bool:
        """Let the pins that keep ``copies`` for ``request`` be its load's from now on.

        Returns:
            Whether it was kept exactly these, all whole; if not, nothing changed.
        """
        granted = request.granted
        if len(granted) != len(copies) or request.pending or granted.keys() != set(copies):
            return False
        for copy in copies:
            copy.grants = grants = copy.grants - 1
            if not grants:
                self.granted -= 1
        granted.clear()
        return True

    def give_up(self, request: RequestState) -> None:
        """Keep and promise nothing more for ``request``: a load of its did not work.

        It would be asked again and answered the same for as long as what broke the load lasts.
        """
        self.release(request)
        request.phase = Phase.FAILED
        request.tails.clear()  # it offers its chunks again from the root

    def take_from_all(self, copy: ChunkCopy) -> None:
        """End the grants of a whole copy that must leave; it will be a miss for everybody."""
        for request in (*self._waiting, *self._settled):
            if copy in request.granted:
                self._give_back(request, (copy,))

    def settle(self, copy: ChunkCopy, *, arrived: bool) -> None:
        """Tell the requests that wait for ``copy`` that it is whole, or will not be in time."""
        waiters = self._waiters.pop(copy, ())
        for request in waiters:
            request.pending -= 1
            if not arrived:
                del request.granted[copy]
            if not request.pending and request.phase == Phase.WAITING:
                self._settle_request(request)
        if not arrived and copy.grants:
            copy.pins -= copy.grants
            copy.grants = 0
            self.granted -= 1

    def settle_arrived(self, copies: Sequence[ChunkCopy]) -> None:
        """Do :meth:`settle` for copies that are whole; nothing where nobody waits for any."""
        if not self._waiters:
            return
        waiting = list(map(self._waiters.pop, copies, repeat(())))
        if waiting and waiting.count(waiting[0]) == len(waiting):
            self._arrived_for(waiting[0], len(waiting))
            return
        by_id = {id(waiters): waiters for waiters in waiting}
        for each, chunks in Counter(map(id, waiting)).items():
            self._arrived_for(by_id[each], chunks)

    def _arrived_for(self, waiters: _Waiters, chunks: int) -> None:
        """Tell ``waiters`` that ``chunks`` of what they wait for are whole."""
        for request in waiters:
            request.pending -= chunks
            if not request.pending and request.phase == Phase.WAITING:
                self._settle_request(request)

    def apply(self, record: JobRecord, result: TransferResult) -> list[ChunkCopy]:
        """Take a promotion job's outcome into account.

        Returns:
            Copies now in RAM whose source left.
        """
        if not result.settled:
            self._expire(record)
            return []
        ram = self._ladder.ram
        source_tier = self._ladder.tiers[record.source]
        source_tier.unpin_many(record.sources)
        arrived = record.destinations
        if result.outcomes.count(_DONE) < len(arrived):
            arrived = self._arrived(record, result)
        self._ladder.publish(ram, arrived)
        moved = self._take_away(record, result)
        read = [source for source in record.sources if source.state == _RESIDENT]
        source_tier.touch(read, self._ladder.ctx)
        self.settle_arrived(arrived)
        passing = sum([copy.transient for copy in arrived]) if ram.passing else 0
        source_tier.counters.promoted += len(arrived) - passing
        self._ladder.drop_passed(arrived)  # those whose request is gone
        return moved

    def _arrived(self, record: JobRecord, result: TransferResult) -> list[ChunkCopy]:
        """Give up the chunks of a job that did not come up and return the others."""
        arrived: list[ChunkCopy] = []
        for source, copy, outcome in zip(
            record.sources, record.destinations, result.outcomes, strict=True
        ):
            if outcome is _DONE:
                arrived.append(copy)
                continue
            self.settle(copy, arrived=False)
            self._ladder.ram.abort(copy)
            self._blame(record, source, outcome)
        return arrived

    def clear(self) -> None:
        """Forget every grant and every waiting request; for a reset of the cache."""
        self._asking.clear()
        self._queue.clear()
        self._waiting.clear()
        self._settled.clear()
        self._waiters.clear()
        self.granted = 0

    def _expire(self, record: JobRecord) -> None:
        record.late = True
        self._ladder.tiers[record.source].counters.expired += len(record.sources)
        for copy in record.destinations:
            if copy.state == CopyState.WRITING:
                copy.state = CopyState.LATE
                self.settle(copy, arrived=False)

    def _take_away(self, record: JobRecord, result: TransferResult) -> list[ChunkCopy]:
        """Drop the sources that were to move; return the copies that took their place."""
        tier = self._ladder.tiers[record.source]
        moved: list[ChunkCopy] = []
        if not record.moved:
            return moved
        for source, copy, outcome in zip(
            record.sources, record.destinations, result.outcomes, strict=True
        ):
            if source in record.moved and outcome is _DONE:
                moved.append(copy)
                self._ladder.drop(tier, source)
        return moved

    def _blame(self, record: JobRecord, source: ChunkCopy, outcome: Outcome) -> None:
        """Count a chunk that did not come up, and forget one whose bytes are wrong."""
        tier = self._ladder.tiers[record.source]
        if outcome is Outcome.CORRUPT:
            self._ladder.condemn(tier, source)
        elif not record.late:  # else it was counted when its deadline passed
            tier.counters.note_failure(outcome, reading=True)

    def _start(self, request: RequestState, *, whole: bool) -> bool:
        """Grant ``request`` what it asked for.

        Args:
            request: A queued request.
            whole: Whether to wait rather than to cut the prefix to what fits now.

        Returns:
            Whether the request left the queue.
        """
        budget = self._ladder.limits.pin_budget
        stuck = self._ladder.ledger.stuck
        held = self.granted + self.streaming + stuck
        below = self._ladder.readable(request.terms.load_tiers)
        found, choice = self._worthwhile(survey(request.asked, self._ram, below))
        cost = found.cost
        if cost > budget - stuck:  # nobody knows when those come back
            whole = False
        if cost > budget - held:
            if whole:
                return False
            found = found.affordable(budget - held)
        if 0 in found.tiers:
            self._grant(request, found.in_ram().copies)
        brought = self._fetch(request, found, whole=whole)
        if brought is None:
            self._take_back(request)
            return False
        self._give_back(request, found.stranded(brought))
        self._ladder.worth.skip(choice)
        request.phase = Phase.WAITING
        request.asked.clear()
        request.wanting = False
        request.lookups = 0
        self._waiting[request] = None
        if not request.pending:
            self._settle_request(request)
        return True

    def _worthwhile(self, found: Found) -> tuple[Found, LoadChoice | None]:
        """Return the head of ``found`` that is worth its time, and why no more is."""
        if not any(found.tiers):
            return found, None
        now = self._ladder.ctx.now
        choice = self._ladder.worth.choose(found.tiers, groups=found.groups, now=now)
        return (found, None) if choice is None else (found.head(choice.kept), choice)

    def _fetch(self, request: RequestState, found: Found, *, whole: bool) -> int | None:
        """Bring up what of ``found`` is not in RAM, or the head of it when not ``whole``.

        Returns:
            How many chunks; None when all was wanted and there is no room for it now.
        """
        sources = list(compress(*found))
        if not sources:
            return 0
        ram = self._ladder.ram
        short = len(sources) - ram.room
        if short > 0:
            if whole:
                ram.want(len(sources))
                return None
            self._ladder.retention.give_way(short)
            if ram.room < len(sources):
                sources = sources[: ram.room] if found.groups == 1 else []
        if not sources:
            return 0
        tiers = [tier for tier in found.tiers if tier][: len(sources)]
        rises = plan_rise(self._ladder, sources, tiers)
        if rises is None:
            return None if whole else 0
        for rise in rises:
            request.jobs.add(rise.job_id)
            self._await(request, rise.copies)
        return len(sources)

    def _settle_request(self, request: RequestState) -> None:
        request.phase = Phase.SETTLED
        request.asked_at = self.step
        self._waiting.pop(request, None)
        self._settled[request] = None

    def _let_lapse(self) -> None:
        """End the grants of requests that nobody has asked about for long.

        Such a request was scheduled without a word, as after a preemption, or it stands behind
        others; there it would hold the room that those in front of it need. It may ask afresh.
        """
        oldest = self.step - self._ladder.limits.patience_grants
        for request in [held for held in self._settled if held.asked_at < oldest]:
            self.release(request)

    def _give_up(self) -> None:
        """Settle requests that have waited too long for chunks on their way.

        Promotions have deadlines. What has none is a chunk that another request's worker is
        storing: it is acknowledged within a few steps, or the engine is in trouble.
        """
        for request in list(self._waiting):
            request.lookups += 1
            if request.lookups >= self._ladder.limits.patience_arrivals:
                self._settle_request(request)

    def _await(self, request: RequestState, copies: Sequence[ChunkCopy]) -> None:
        """Do :meth:`_grant` for copies whose promotion was just planned, for this request."""
        for copy in copies:
            copy.grants = 1
            copy.pins += 1
        self.granted += len(copies)
        request.granted.update(dict.fromkeys(copies))
        request.pending += len(copies)
        self._waiters.update(dict.fromkeys(copies, (request,)))

    def _grant(self, request: RequestState, copies: Sequence[ChunkCopy]) -> None:
        """Keep ``copies``, whole in RAM or on their way there, for ``request``."""
        coming = []
        for copy in copies:
            if not copy.grants:
                self.granted += 1
            copy.grants += 1
            if copy.state != _RESIDENT:
                coming.append(copy)
        self._ladder.ram.pin_many(copies)
        request.granted.update(dict.fromkeys(copies))
        if coming:
            request.pending += len(coming)
            self._rewait(coming, lambda others: (*others, request))

    def _take_back(self, request: RequestState) -> None:
        """Keep nothing for ``request``."""
        self._give_back(request, list(request.granted))

    def _give_back(self, request: RequestState, copies: Sequence[ChunkCopy]) -> None:
        """Keep ``copies`` no longer for ``request``."""
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
        self._ladder.ram.unpin_many(copies)
        self._ladder.drop_passed(copies)

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
