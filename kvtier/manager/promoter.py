"""Promotes chunks for requests that are about to start.

The engine looks a waiting request up at every step until it is scheduled. What is found in a
slower tier must be in RAM before the request may count on it, and must stay there until the
request loads it: a promotion that nobody protects is evicted by the next one, and a prefix
larger than RAM is then promoted for ever while the request never runs. So:

* A request is queued once, with the chunks of its whole hit. At the end of the step they are
  *granted* together: resident copies are pinned for it, missing ones are promoted into slots
  pinned for it.
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

from collections.abc import Iterable
from itertools import compress
from typing import Final

from kvtier.keys import ChunkKey
from kvtier.manager.found import Found, survey
from kvtier.manager.grants import Grants
from kvtier.manager.ladder import Ladder
from kvtier.manager.promotion_jobs import PromotionJobs
from kvtier.manager.requests import BudgetUse, Phase, RequestState
from kvtier.manager.weighing import LoadChoice

__all__ = ["Promoter"]

_LOOK_AGAIN_LOOKUPS: Final = 16


class Promoter:
    """Grants chunks to waiting requests and plans the promotions that takes."""

    def __init__(self, ladder: Ladder, grants: Grants, jobs: PromotionJobs) -> None:
        self._ladder = ladder
        self._ram = ladder.ram
        self._grants = grants
        self._jobs = jobs
        self._queue: dict[RequestState, None] = {}

    def enqueue(self, request: RequestState, keys: Iterable[ChunkKey]) -> None:
        """Queue ``request`` for the chunks that its load needs; granted when the step ends."""
        request.asked = list(dict.fromkeys(keys))  # each is granted once
        request.phase = Phase.QUEUED
        request.queued_s = self._ladder.ctx.now
        self._queue[request] = None

    @property
    def is_busy(self) -> bool:
        """Whether requests wait or are kept anything."""
        return bool(self._queue or self._grants.waiting or self._grants.settled)

    def end_step(self) -> None:
        """Grant what this step's requests asked for, first come first served."""
        if self._grants.waiting:
            self._grants.end_waits()
        if self._grants.settled:
            self._let_lapse()
        if self._queue:
            self._serve()

    def release(self, request: RequestState) -> None:
        """End whatever is kept or planned for ``request``; it may ask afresh afterwards."""
        if request.phase == Phase.ASKING:
            return
        self._queue.pop(request, None)
        self._grants.release(request)
        for job_id in request.jobs:
            record = self._ladder.ledger.find(job_id)
            if record is not None and not any(copy.grants for copy in record.destinations):
                self._ladder.ledger.cancel(job_id)
        request.jobs.clear()
        request.asked.clear()
        request.lookups = 0
        request.too_dear = None
        if request.phase != Phase.FAILED:
            request.phase = Phase.ASKING

    def give_up(self, request: RequestState) -> None:
        """Keep nothing more for ``request``: a load of its did not work.

        It would be asked again and answered the same for as long as what broke the load lasts.
        """
        self.release(request)
        request.phase = Phase.FAILED
        request.tails.clear()  # it offers its chunks again from the root

    def clear(self) -> None:
        """Forget every grant and every waiting request; for a reset of the cache."""
        self._queue.clear()
        self._grants.clear()

    def _serve(self) -> None:
        """Grant what those in the queue asked for, as far as the budget goes."""
        blocked = False
        limits, now = self._ladder.limits, self._ladder.ctx.now
        for request in list(self._queue):
            request.lookups += 1
            # Neither alone says how long a wait is: an engine that computes takes tens of
            # milliseconds for a step, an idle one takes a thousand steps a second.
            patient = (
                request.lookups < limits.max_queue_steps
                or now - request.queued_s < limits.max_queue_s
            )
            if patient and (blocked or self._is_as_dear(request)):
                blocked = True
                continue
            if self._start(request, whole=patient):
                del self._queue[request]
            else:
                blocked = True

    def _is_as_dear(self, request: RequestState) -> bool:
        """Return whether looking at all ``request`` asked for would find as little room again.

        A request that waits for the budget may have asked for thousands of chunks. What they
        cost can change otherwise as well, as when some are evicted, so they are looked at now
        and then all the same.
        """
        if request.lookups % _LOOK_AGAIN_LOOKUPS == 0:
            return False
        return request.too_dear == self._budget_use()

    def _budget_use(self) -> BudgetUse:
        grants = self._grants
        return grants.changes, grants.streaming, self._ladder.ledger.stuck

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
        held = self._grants.granted + self._grants.streaming + stuck
        below = self._ladder.readable(request.terms.load_tiers)
        found, choice = self._worthwhile(survey(request.asked, self._ram, below))
        cost = found.cost
        if cost > budget - stuck:  # nobody knows when those come back
            whole = False
        request.too_dear = None
        if cost > budget - held:
            if whole:
                request.too_dear = self._budget_use()
                return False
            found = found.affordable(budget - held)
        if 0 in found.tiers:
            self._grants.keep(request, found.in_ram().copies)
        brought = self._fetch(request, found, whole=whole)
        if brought is None:
            self._grants.give_back(request, list(request.granted))
            return False
        self._grants.give_back(request, found.stranded(brought))
        self._ladder.cost_model.record_skip(choice)
        request.asked.clear()
        request.lookups = 0
        self._grants.await_arrival(request)
        return True

    def _worthwhile(self, found: Found) -> tuple[Found, LoadChoice | None]:
        """Return the head of ``found`` that is worth its time, and why no more is."""
        if not any(found.tiers):
            return found, None
        now = self._ladder.ctx.now
        choice = self._ladder.cost_model.choose(found.tiers, counted=found.counted, now=now)
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
        jobs = self._jobs.plan(sources, tiers)
        if jobs is None:
            return None if whole else 0
        for job in jobs:
            request.jobs.add(job.job_id)
            self._grants.keep_coming(request, job.copies)
        return len(sources)

    def _let_lapse(self) -> None:
        """End the grants of requests that nobody has asked about for long.

        Such a request was scheduled without a word, as after a preemption, or it stands behind
        others; there it would hold the room that those in front of it need. It may ask afresh.
        """
        for request in self._grants.lapsed():
            self.release(request)
