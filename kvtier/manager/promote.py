"""Promotes chunks of slower tiers to RAM for waiting requests.

The engine looks a waiting request up at every step until it is scheduled. Chunks found in a
slower tier must be in RAM before the request may count on them, and stay there until its load.
Otherwise one promotion evicts the chunks of another, and a prefix larger than RAM is promoted
for ever while its request never runs. So:

* A request is queued once, with all chunks of its hit. They are granted together at the end of
  a step (:mod:`kvtier.manager.grants`): resident copies are pinned, and missing ones promoted
  into pinned slots.
* A budget bounds the grants. A request that fits the budget, but not its unused part, waits
  for a bounded number of steps and seconds, first come first served. A request that never fits
  or waited too long is granted the head of its prefix that fits; the rest is recomputed. With
  several KV cache groups nothing is promoted then: a head of one group is useless.
* When all its chunks have arrived or failed, the request is settled: only RAM counts from then
  on. So every request has its result within a bounded number of lookups.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Final

from kvtier.manager.cost_model import LoadChoice
from kvtier.manager.grants import Grants, RequestState
from kvtier.manager.jobs import JobRecord
from kvtier.manager.lookup import LookupResult, find_leading
from kvtier.manager.tier_stack import TierStack
from kvtier.policies import ChunkCopy, CopyState
from kvtier.types import JobId, Outcome, Purpose, TransferResult

__all__ = ["Promoter"]

_RECHECK_STEPS: Final = 16
_RESIDENT = CopyState.RESIDENT
_DONE = Outcome.DONE


class Promoter:
    """Grants chunks to queued requests, plans promotion jobs and applies their results."""

    def __init__(self, stack: TierStack, grants: Grants) -> None:
        self._stack = stack
        self._ram = stack.ram
        self._grants = grants

    def end_step(self) -> None:
        """Grant queued requests their chunks within the budget, first come first served."""
        limits, now = self._stack.limits, self._stack.ctx.now
        is_blocked = False
        for request in list(self._grants.queued):
            request.deferred_steps += 1
            # Steps alone do not measure a wait: a busy engine takes tens of milliseconds for
            # one, an idle engine does a thousand per second.
            may_wait = (
                request.deferred_steps < limits.max_queue_steps
                or now - request.wanted_since_s < limits.max_queue_s
            )
            must_wait = may_wait and (is_blocked or self._is_still_refused(request))
            if must_wait or not self._start(request, may_wait=may_wait):
                is_blocked = True

    def plan(
        self, sources: Sequence[ChunkCopy], tiers: Sequence[int]
    ) -> list[tuple[JobId, Sequence[ChunkCopy]]] | None:
        """Allocate RAM slots for chunks, evicting as needed, and plan the jobs that fill them.

        Args:
            sources: Copies of chunks that are not in RAM; at least one.
            tiers: Index of the tier of each.

        Returns:
            Each job's id and the RAM copies that it writes; None, and nothing changed, if too
            few copies can be evicted.
        """
        stack = self._stack
        taken = stack.take_slots(self._ram, [source.key for source in sources])
        if taken is None:
            return None
        slots, _ = taken
        self._ram.counters.misses += len(sources)
        stack.slot_status.withdraw(slots)
        jobs = []
        for index in dict.fromkeys(tiers):
            of_tier = [tier == index for tier in tiers]
            some, places = list(compress(sources, of_tier)), list(compress(slots, of_tier))
            for at in range(0, len(some), stack.limits.batch):
                end = at + stack.limits.batch
                jobs.append(self._plan_job(index, some[at:end], places[at:end]))
        return jobs

    def apply(self, record: JobRecord, result: TransferResult) -> list[ChunkCopy]:
        """Apply the result of a promotion job.

        Returns:
            RAM copies of moved chunks; the copies that they were read from were dropped.
        """
        if not result.settled:
            self._expire(record)
            return []
        stack, ram = self._stack, self._ram
        tier = stack.tiers[record.source]
        tier.unpin(record.sources)
        arrived, failures = record.split(result.outcomes)
        for source, copy, outcome in failures:
            self._grants.record_missing(copy)
            ram.abort(copy)
            if outcome is Outcome.CORRUPT:
                stack.drop_corrupt(tier, source)
            elif not record.is_late:  # else it was counted at its deadline
                tier.counters.record_failure(outcome, reading=True)
        stack.publish(ram, arrived)
        moved = self._drop_moved(record, result)
        unread = {source for source, _, _ in failures}
        read = [
            source
            for source in record.sources
            if source.state == _RESIDENT and source not in unread
        ]
        tier.touch(read, stack.ctx)
        self._grants.record_arrived(arrived)
        transient = sum([copy.transient for copy in arrived]) if ram.transient else 0
        tier.counters.promoted += len(arrived) - transient
        stack.drop_transient(arrived)  # those whose request ended
        return moved

    # -- granting ---------------------------------------------------------------------------

    def _is_still_refused(self, request: RequestState) -> bool:
        """Return whether the budget's use is unchanged since ``request`` did not fit.

        Computing the cost of thousands of chunks takes long. While the budget's use is
        constant, the cost is computed only now and then: evictions may change it too.
        """
        if request.deferred_steps % _RECHECK_STEPS == 0:
            return False
        return request.refused_at == self._grants.budget_use

    def _start(self, request: RequestState, *, may_wait: bool) -> bool:
        """Grant a queued request its chunks; return whether it left the queue.

        Args:
            request: The request.
            may_wait: Whether to wait instead of cutting the prefix to the part that fits now.
        """
        stack, grants = self._stack, self._grants
        budget = stack.limits.pin_budget
        readable = stack.readable(request.terms.load_tiers)
        found, choice = self._worthwhile(find_leading(request.wanted, self._ram, readable))
        cost = found.cost
        if cost > budget - stack.jobs.late_slots:  # nobody knows when those are free again
            may_wait = False
        request.refused_at = None
        left = budget - grants.used_budget
        if cost > left:
            if may_wait:
                request.refused_at = grants.budget_use
                return False
            found = found.affordable(left)
        if 0 in found.tiers:
            grants.grant(request, found.in_ram().copies)
        promoted = self._promote(request, found, may_wait=may_wait)
        if promoted is None:
            grants.withdraw(request, list(request.granted))
            return False
        grants.withdraw(request, found.unreachable(promoted))
        stack.cost_model.record_skip(choice)
        grants.await_arrival(request)
        return True

    def _worthwhile(self, found: LookupResult) -> tuple[LookupResult, LoadChoice | None]:
        """Return the head of ``found`` that is worth loading, and the reason for its length."""
        if not any(found.tiers):
            return found, None
        now = self._stack.ctx.now
        choice = self._stack.cost_model.choose(found.tiers, counted=found.counted, now=now)
        return (found, None) if choice is None else (found.head(choice.kept), choice)

    def _promote(
        self, request: RequestState, found: LookupResult, *, may_wait: bool
    ) -> int | None:
        """Plan jobs for the chunks of ``found`` in slower tiers, or for their head.

        Returns:
            The number of promoted chunks; None if too few slots are free for all of them.
        """
        sources = list(compress(*found))
        if not sources:
            return 0
        ram = self._ram
        shortage = len(sources) - ram.available
        if shortage > 0:
            if may_wait:
                ram.request_slots(len(sources))
                return None
            self._stack.retention.release_early(shortage)
            if ram.available < len(sources):
                sources = sources[: ram.available] if found.groups == 1 else []
        if not sources:
            return 0
        tiers = [tier for tier in found.tiers if tier][: len(sources)]
        jobs = self.plan(sources, tiers)
        if jobs is None:
            return None if may_wait else 0
        for job_id, copies in jobs:
            request.jobs.add(job_id)
            self._grants.grant(request, copies)
        return len(sources)

    # -- jobs -------------------------------------------------------------------------------

    def _plan_job(
        self, index: int, sources: Sequence[ChunkCopy], slots: Sequence[int]
    ) -> tuple[JobId, Sequence[ChunkCopy]]:
        """Plan a job that reads ``sources`` of tier ``index``; return its id and RAM copies."""
        stack = self._stack
        keys = [source.key for source in sources]
        generation = stack.next_generation()
        copies = self._ram.begin_copying(
            keys, slots, sources, origin=index, generation=generation
        )
        stack.tiers[index].pin(sources)
        moved = self._apply_placement(index, sources, copies)
        for source in sources:
            source.hits += 1
        places = [source.slot for source in sources]
        job_id = stack.jobs.add(
            JobRecord(
                purpose=Purpose.PROMOTE,
                source=index,
                destination=0,
                sources=sources,
                keys=keys,
                source_slots=places,
                destinations=copies,
                epoch=stack.epoch,
                moved=moved,
            ),
            slots,
            timeout_s=stack.limits.load_timeout_s,
            generations=[generation] * len(copies),
        )
        stack.cost_model.record_job(job_id, index, len(copies))
        return job_id, copies

    def _apply_placement(
        self, index: int, sources: Sequence[ChunkCopy], copies: Sequence[ChunkCopy]
    ) -> set[ChunkCopy]:
        """Ask the placement policy how to promote ``sources``; return the sources to drop."""
        moved: set[ChunkCopy] = set()
        ways = self._stack.placement.promote_many(sources, index, self._stack.ctx)
        first = ways[0]
        if first.keep_source and first.stay and ways.count(first) == len(ways):
            return moved
        for source, copy, way in zip(sources, copies, ways, strict=True):
            if not way.keep_source:
                moved.add(source)
            elif not way.stay:
                self._ram.make_transient(copy)
        return moved

    def _expire(self, record: JobRecord) -> None:
        """End the waits for the chunks of a job that missed its deadline."""
        record.is_late = True
        self._stack.tiers[record.source].counters.expired += len(record.sources)
        for copy in record.destinations:
            if self._ram.expire(copy):
                self._grants.record_missing(copy)

    def _drop_moved(self, record: JobRecord, result: TransferResult) -> list[ChunkCopy]:
        """Drop the sources of moved chunks; return the RAM copies that replace them."""
        moved: list[ChunkCopy] = []
        if not record.moved:
            return moved
        tier = self._stack.tiers[record.source]
        for source, copy, outcome in zip(
            record.sources, record.destinations, result.outcomes, strict=True
        ):
            if source in record.moved and outcome is _DONE:
                moved.append(copy)
                self._stack.drop(tier, source)
        return moved
