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
  rest is recomputed.
* When all its chunks have arrived or failed the request is *settled*: what is in RAM is a
  hit, all else a miss, whatever the slower tiers hold. So every request is answered within a
  bounded number of lookups.
* The grant ends when the request's load is planned (which pins for itself), or when the request
  starts without, is preempted or ends. It lapses when nobody has asked for the request for a
  bounded number of steps: the engine may have forgotten it without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier.keys import GROUP_NBYTES, ChunkKey
from kvtier.manager.ladder import Ladder
from kvtier.manager.ledger import JobRecord
from kvtier.manager.plans import Lookup
from kvtier.manager.requests import Phase, RequestState
from kvtier.manager.rising import Wanted, plan_rise
from kvtier.manager.tier import TierState
from kvtier.manager.worth import LoadChoice
from kvtier.policies import ChunkCopy, CopyState
from kvtier.types import Outcome, TransferResult

__all__ = ["Promoter"]


@dataclass(slots=True)
class _Wish:
    """A chunk a request found: its copy in RAM, or else the copy to bring up."""

    key: ChunkKey
    copy: ChunkCopy | None
    tier: TierState | None
    source: ChunkCopy | None


class Promoter:
    """Grants chunks to waiting requests and plans the promotions that takes.

    Attributes:
        granted: RAM slots held for waiting requests.
        streaming: RAM slots of chunks that loads in flight brought up; of the same budget.
        step: Scheduling steps so far.
    """

    def __init__(self, ladder: Ladder) -> None:
        self._ladder = ladder
        self._asking: dict[RequestState, None] = {}
        self._queue: dict[RequestState, None] = {}
        self._waiting: dict[RequestState, None] = {}
        self._settled: dict[RequestState, None] = {}
        self._waiters: dict[ChunkCopy, list[RequestState]] = {}
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
        for request in self._asking:
            if request.wanting:
                request.phase = Phase.QUEUED
                request.queued_s = self._ladder.ctx.now
                self._queue[request] = None
            else:
                request.asked.clear()
        self._asking.clear()
        self._give_up()
        self._let_lapse()
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
        self._asking.pop(request, None)
        self._queue.pop(request, None)
        self._waiting.pop(request, None)
        self._settled.pop(request, None)
        granted, request.granted = request.granted, []
        for copy in granted:
            if copy.state != CopyState.RESIDENT:
                self._waiters[copy].remove(request)
            self._ungrant(copy)
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

    def give_up(self, request: RequestState) -> None:
        """Keep and promise nothing more for ``request``: a load of its did not work.

        It would be asked again and answered the same for as long as what broke the load lasts.
        """
        self.release(request)
        request.phase = Phase.FAILED

    def take_from_all(self, copy: ChunkCopy) -> None:
        """End the grants of a whole copy that must leave; it will be a miss for everybody."""
        for request in (*self._waiting, *self._settled):
            while copy in request.granted:
                self._give_back(request, copy)

    def settle(self, copy: ChunkCopy, *, arrived: bool) -> None:
        """Tell the requests that wait for ``copy`` that it is whole, or will not be in time."""
        waiters = self._waiters.pop(copy, ())
        for request in waiters:
            request.pending -= 1
            if not arrived:
                request.granted.remove(copy)
            if not request.pending and request.phase == Phase.WAITING:
                self._settle_request(request)
        if not arrived and copy.grants:
            copy.pins -= copy.grants
            copy.grants = 0
            self.granted -= 1

    def settle_arrived(self, copies: Sequence[ChunkCopy]) -> None:
        """Do :meth:`settle` for copies that are whole; nothing where nobody waits for any."""
        if self._waiters:
            for copy in copies:
                self.settle(copy, arrived=True)

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
        arrived: list[ChunkCopy] = []
        for source, copy, outcome in zip(
            record.sources, record.destinations, result.outcomes, strict=True
        ):
            source_tier.unpin(source)
            if outcome is Outcome.DONE:
                arrived.append(copy)
                continue
            self.settle(copy, arrived=False)
            ram.abort(copy)
            self._blame(record, source, outcome)
        self._ladder.publish(ram, arrived)
        moved = self._take_away(record, result)
        read = [source for source in record.sources if source.state == CopyState.RESIDENT]
        source_tier.touch(read, self._ladder.ctx)
        for copy in arrived:
            self.settle(copy, arrived=True)
            if not copy.transient:
                source_tier.counters.promoted += 1
            elif not copy.pins:
                self._ladder.drop(ram, copy)  # whoever it was fetched for is gone
        return moved

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
        for source, copy, outcome in zip(
            record.sources, record.destinations, result.outcomes, strict=True
        ):
            if source in record.moved and outcome is Outcome.DONE:
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
        held = self.granted + self.streaming
        wishes, choice = self._worthwhile(self._survey(request))
        cost = _cost(wishes)
        if cost > budget:
            whole = False
        if whole and cost > budget - held:
            return False
        wishes = _head(wishes, grants=budget - held)
        for wish in wishes:
            if wish.copy is not None:
                self._grant(request, wish.copy)
        if not self._fetch(request, wishes, whole=whole):
            self._take_back(request)
            return False
        self._cut(request, wishes)
        self._ladder.worth.skip(choice)
        request.phase = Phase.WAITING
        request.asked.clear()
        request.wanting = False
        request.lookups = 0
        self._waiting[request] = None
        if not request.pending:
            self._settle_request(request)
        return True

    def _worthwhile(self, wishes: list[_Wish]) -> tuple[list[_Wish], LoadChoice | None]:
        """Return the head of ``wishes`` that is worth its time, and why no more is."""
        sources = [0 if wish.tier is None else wish.tier.index for wish in wishes]
        if not any(sources):
            return wishes, None
        groups = len({wish.key[-GROUP_NBYTES:] for wish in wishes})
        now = self._ladder.ctx.now
        choice = self._ladder.worth.choose(sources, groups=groups, now=now)
        return (wishes, None) if choice is None else (wishes[: choice.kept], choice)

    def _fetch(self, request: RequestState, wishes: Sequence[_Wish], *, whole: bool) -> bool:
        """Bring up what of ``wishes`` is not in RAM, or the head of it when not ``whole``.

        Returns:
            False when all was wanted and there is no room for it now.
        """
        missing = [wish for wish in wishes if wish.copy is None]
        ram = self._ladder.ram
        short = len(missing) - ram.room
        if whole and short > 0:
            ram.want(len(missing))
            return False
        if short > 0:
            self._ladder.retention.give_way(short)
        return self._bring_up(request, missing[: ram.room]) or not whole

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

    def _survey(self, request: RequestState) -> list[_Wish]:
        """Find again what ``request`` asked for; ends at the first chunk that is nowhere."""
        wishes: list[_Wish] = []
        copies = self._ladder.ram.copies
        for key in request.asked:
            copy = copies.get(key)
            if copy is None:
                found = self._ladder.reachable_copy(key, within=request.terms.load_tiers)
                if found is None:
                    break
                wishes.append(_Wish(key, None, *found))
            elif copy.state == CopyState.LATE:
                break
            else:
                wishes.append(_Wish(key, copy, None, None))
        return wishes

    def _bring_up(self, request: RequestState, missing: Sequence[_Wish]) -> bool:
        """Plan the promotion of ``missing`` into slots granted to ``request``."""
        if not missing:
            return True
        found = [
            Wanted(wish.key, wish.tier, wish.source)
            for wish in missing
            if wish.tier is not None and wish.source is not None
        ]
        rises = plan_rise(self._ladder, found)
        if rises is None:
            return False
        members = self._ladder.ram.copies
        for rise in rises:
            request.jobs.add(rise.job_id)
            for copy in rise.copies:
                self._grant(request, copy)
        for wish in missing:
            wish.copy = members[wish.key]
        return True

    def _cut(self, request: RequestState, wishes: Sequence[_Wish]) -> None:
        """Give back grants behind the first chunk that could not be brought up."""
        whole = True
        for wish in wishes:
            if wish.copy is None:
                whole = False
            elif not whole:
                self._give_back(request, wish.copy)

    def _grant(self, request: RequestState, copy: ChunkCopy) -> None:
        if not copy.grants:
            self.granted += 1
        copy.grants += 1
        self._ladder.ram.pin(copy)
        request.granted.append(copy)
        if copy.state != CopyState.RESIDENT:
            request.pending += 1
            self._waiters.setdefault(copy, []).append(request)

    def _give_back(self, request: RequestState, copy: ChunkCopy) -> None:
        request.granted.remove(copy)
        if copy.state != CopyState.RESIDENT:
            request.pending -= 1
            self._waiters[copy].remove(request)
        self._ungrant(copy)

    def _take_back(self, request: RequestState) -> None:
        for copy in list(request.granted):
            self._give_back(request, copy)

    def _ungrant(self, copy: ChunkCopy) -> None:
        copy.grants -= 1
        if not copy.grants:
            self.granted -= 1
        ram = self._ladder.ram
        ram.unpin(copy)
        if copy.transient and not copy.pins and copy.state == CopyState.RESIDENT:
            self._ladder.drop(ram, copy)


def _cost(wishes: Sequence[_Wish]) -> int:
    """Return how many RAM slots granting ``wishes`` would newly hold."""
    return sum(wish.copy is None or not wish.copy.grants for wish in wishes)


def _head(wishes: list[_Wish], *, grants: int) -> list[_Wish]:
    """Return the longest head of ``wishes`` that newly holds at most ``grants`` slots."""
    for end, wish in enumerate(wishes):
        if wish.copy is None or not wish.copy.grants:
            grants -= 1
            if grants < 0:
                return wishes[:end]
    return wishes
