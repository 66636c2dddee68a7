"""Promotes chunks of slower tiers to RAM for waiting requests.

A request whose hit cannot be loaded at once (:mod:`kvtier.manager.direct`) is looked up at
every step until its chunks are in RAM. The chunks must stay in RAM until the load. Otherwise
one promotion could evict the chunks of another, and a prefix larger than RAM would be promoted
again and again but never loaded. So:

* A request is queued once, with all chunks of its hit. The chunks are granted together at the
  end of a step (:mod:`kvtier.manager.grants`): resident copies are pinned, and missing chunks
  are promoted into pinned slots.
* A budget bounds the grants. A request that fits the budget, but not the unused part of the
  budget, waits for a bounded number of steps and seconds. Requests are served in order. A
  request that never fits, or waited too long, is granted the first chunks of its hit that fit.
  The engine computes the rest. With several KV cache groups such a request gets no promotion,
  because the first chunks of one group are useless without the other groups.
* When all chunks of a request have arrived or failed, the request is settled: its lookups
  search only RAM. So every request gets a result within a bounded number of lookups.

The placement policy decides whether the slower tier keeps its copies
(:meth:`Placement.promote <kvtier.policies.Placement.promote>`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import NamedTuple

from kvtier.keys import ChunkKey, is_single_group
from kvtier.manager.copies import link
from kvtier.manager.cost_model import LoadChoice
from kvtier.manager.grants import Grants, RequestState
from kvtier.manager.storage_jobs import JobRecord, StorageJobs
from kvtier.manager.tier import TierState
from kvtier.manager.tier_stack import TierStack
from kvtier.policies import ChunkCopy, CopyState, Promotion
from kvtier.types import JobId, TransferResult

__all__ = ["Hit", "Promoter"]

_RESIDENT = CopyState.RESIDENT


class Hit(NamedTuple):
    """The chunks of a hit, in the order of the request's load.

    Attributes:
        copies: A copy of each chunk, in RAM if possible, else in a slower tier.
        tiers: Index of the tier of each copy.
    """

    copies: Sequence[ChunkCopy]
    tiers: Sequence[int]

    @property
    def is_single_group(self) -> bool:
        """Whether the chunks belong to one KV cache group."""
        copies = self.copies
        return not copies or is_single_group((copies[0].key, copies[-1].key))

    def counted(self, is_counted: Callable[[ChunkKey], bool]) -> int:
        """Return the number of chunks in the counting group; the hit must not be empty."""
        if self.is_single_group:
            return len(self.copies) if is_counted(self.copies[0].key) else 0
        return sum([is_counted(copy.key) for copy in self.copies])

    @property
    def cost(self) -> int:
        """Number of slots of the pin budget that a grant of the chunks would use."""
        return sum([bool(tier or not copy.grants) for copy, tier in zip(*self, strict=True)])

    def head(self, chunks: int) -> Hit:
        """Return the hit, cut to its first ``chunks`` chunks."""
        return Hit(self.copies[:chunks], self.tiers[:chunks])

    def in_ram(self) -> list[ChunkCopy]:
        """Return the copies that are in RAM."""
        return [copy for copy, tier in zip(*self, strict=True) if not tier]

    def affordable(self, budget: int) -> Hit:
        """Return the leading chunks of the hit that cost at most ``budget`` slots.

        With several groups, the first chunks of one group are useless alone. The result then
        has only the chunks in RAM.
        """
        hit = self
        if not self.is_single_group:
            copies = self.in_ram()
            hit = Hit(copies, [0] * len(copies))
        for end, (copy, tier) in enumerate(zip(*hit, strict=True)):
            if tier or not copy.grants:
                budget -= 1
                if budget < 0:
                    return hit.head(end)
        return hit

    def unreachable(self, promoted: int) -> list[ChunkCopy]:
        """Return the RAM copies behind the first chunk that is not promoted.

        Args:
            promoted: Number of leading chunks of slower tiers that are promoted.
        """
        if promoted == len(self.tiers) - self.tiers.count(0):
            return []
        behind: list[ChunkCopy] = []
        for copy, tier in zip(*self, strict=True):
            if tier:
                promoted -= 1
            elif promoted < 0:
                behind.append(copy)
        return behind


class Promoter:
    """Pins chunks for queued requests, plans promotion jobs and applies their results."""

    def __init__(self, stack: TierStack, jobs: StorageJobs, grants: Grants) -> None:
        self._stack = stack
        self._ram = stack.ram
        self._jobs = jobs
        self._grants = grants

    def end_step(self) -> None:
        """Grant queued requests their chunks within the budget, in the order of the queue."""
        limits, now = self._stack.limits, self._stack.ctx.now
        is_blocked = False
        for request in list(self._grants.queued):
            # Steps alone do not measure a wait: a busy engine takes tens of milliseconds for
            # one, an idle engine does a thousand per second.
            may_wait = (
                request.deferred_steps < limits.max_queue_steps
                or now - request.wanted_since_s < limits.max_queue_s
            )
            must_wait = may_wait and (is_blocked or self._grants.is_refused(request))
            if must_wait or not self._start(request, may_wait=may_wait):
                is_blocked = True

    def apply(self, record: JobRecord, result: TransferResult) -> Sequence[ChunkCopy]:
        """Apply the result of a promotion job.

        Returns:
            The RAM copies of moved chunks, which the slower tier has dropped.
        """
        if not result.settled:
            self._expire(record)
            return ()
        stack, ram = self._stack, self._ram
        tier = stack.tiers[record.source]
        arrived, failures = self._jobs.settle(record, result.outcomes)
        for _, copy, outcome in failures:
            self._grants.record_missing(copy)
            if not record.is_late:  # else the job was counted at its deadline
                tier.counters.record_failure(outcome, reading=True)
        stack.publish(ram, arrived)
        unread = {source for source, _, _ in failures}
        moved = [source for source in record.moved if source not in unread]
        for source in moved:
            stack.drop(tier, source)
        read = [
            source
            for source in record.sources.copies
            if source.state == _RESIDENT and source not in unread
        ]
        tier.touch(read, stack.ctx)
        self._grants.record_arrived(arrived)
        tier.counters.promoted += len(arrived)
        return [ram.copies[source.key] for source in moved]

    # -- deciding ---------------------------------------------------------------------------

    def worthwhile(self, hit: Hit) -> tuple[Hit, LoadChoice | None]:
        """Return the chunks of ``hit`` to load, and the decision of the cost model.

        The decision is None if all chunks are to be loaded.
        """
        if not any(hit.tiers):
            return hit, None
        stack = self._stack
        counted = hit.counted(stack.is_counted)
        choice = stack.cost_model.choose(hit.tiers, counted=counted, now=stack.ctx.now)
        return (hit, None) if choice is None else (hit.head(choice.kept), choice)

    def readable(self, request: RequestState | None) -> Sequence[TierState]:
        """Return the slower tiers that ``request`` may read."""
        if request is None:
            return self._stack.readable(None, with_shared=False)
        return self._stack.readable(request.terms.load_tiers, with_shared=request.reads_shared)

    # -- granting ---------------------------------------------------------------------------

    def _start(self, request: RequestState, *, may_wait: bool) -> bool:
        """Pin or promote the chunks of a queued request; return False if it stays queued.

        Args:
            request: The request.
            may_wait: Whether the request may wait. If not, the chunks that fit now are granted.
        """
        stack, grants = self._stack, self._grants
        readable = self.readable(request)
        hit, choice = self.worthwhile(Hit(*stack.find_leading(request.wanted, readable)))
        cost = hit.cost
        may_wait = may_wait and cost <= grants.budget
        if not grants.fits(request, cost):
            if may_wait:
                return False
            hit = hit.affordable(grants.budget_left)
        if 0 in hit.tiers:
            grants.grant(request, hit.in_ram())
        promoted = self._promote(request, hit, may_wait=may_wait)
        if promoted is None:
            grants.withdraw(request, list(request.granted))
            return False
        grants.withdraw(request, hit.unreachable(promoted))
        stack.cost_model.record_skip(choice)
        grants.await_arrival(request)
        return True

    def _promote(self, request: RequestState, hit: Hit, *, may_wait: bool) -> int | None:
        """Plan jobs that promote ``hit``, or only its first chunks if slots are few.

        Returns:
            The number of promoted chunks; None if the request should wait for more free slots.
        """
        sources = list(compress(*hit))
        ram = self._ram
        shortage = len(sources) - ram.available
        if shortage > 0:
            if may_wait:
                ram.request_slots(len(sources))
                return None
            self._stack.retention.release_early(shortage)
            if ram.available < len(sources):
                sources = sources[: ram.available] if hit.is_single_group else []
        if not sources:
            return 0
        tiers = [tier for tier in hit.tiers if tier][: len(sources)]
        for job_id, copies in self.plan(sources, tiers):
            self._grants.grant(request, copies, job_id)
        return len(sources)

    # -- jobs -------------------------------------------------------------------------------

    def plan(
        self, sources: Sequence[ChunkCopy], tiers: Sequence[int]
    ) -> list[tuple[JobId, Sequence[ChunkCopy]]]:
        """Allocate RAM slots for chunks, evicting if needed, and plan the jobs that fill them.

        Args:
            sources: Copies of chunks that RAM lacks; at least one, and at most the number of
                available RAM slots.
            tiers: Index of the tier of each source.

        Returns:
            Each job's id and the RAM copies that it writes.
        """
        stack, ram = self._stack, self._ram
        ram.counters.misses += len(sources)
        link(sources)
        jobs = []
        for index in dict.fromkeys(tiers):
            tier = stack.tiers[index]
            listed = tier.list_of(list(compress(sources, [each == index for each in tiers])))
            tier.pin(listed.copies)
            moved = self._choose_moved(index, listed.copies)
            planned = self._jobs.plan(tier, ram, listed, moved=moved)
            tier.count_hits(listed.copies)
            for job_id, copies in planned:
                stack.cost_model.record_job(job_id, index, len(copies))
            jobs += planned
        return jobs

    def _choose_moved(self, index: int, sources: Sequence[ChunkCopy]) -> set[ChunkCopy]:
        """Ask the placement policy how to promote ``sources``; return the sources to move."""
        ways = self._stack.placement.promote_many(sources, index, self._stack.ctx)
        if Promotion.MOVE not in ways:
            return set()
        retained = self._stack.retentions[index]
        return {
            source
            for source, way in zip(sources, ways, strict=True)
            if way is Promotion.MOVE and source not in retained
        }

    def _expire(self, record: JobRecord) -> None:
        """Mark a job as late, and end the waits for its chunks."""
        record.is_late = True
        self._stack.tiers[record.source].counters.expired += len(record.destinations)
        for copy in record.destinations:
            if self._ram.expire(copy):
                self._grants.record_missing(copy)
