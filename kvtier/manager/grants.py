"""Tracks the phase of each request, the RAM copies pinned for it, and the pin budget.

The next promotion may evict an unpinned promoted chunk. So every chunk that a waiting request
will load is *granted* to the request. The chunk's RAM copy is pinned, even while the bytes are
on their way. A chunk may be granted to many requests. A request is *settled* when all its
chunks have arrived or failed. A request's grants end when its load is planned, because a load
has its own pins. They also end when the request starts without a load, is preempted or ends.
Grants also end after a number of steps without a lookup, because the engine may have dropped
the request without a report.

The *pin budget* bounds the RAM slots held for requests: grants, direct loads in flight, late
promotions, and *reservations* for direct loads of this step. So other requests get RAM slots
even if a tier hangs. A reservation is only a number of slots. It evicts no chunk yet, because
the request may not be scheduled. It does not pin the RAM copies that the load will read, but
they count as unavailable. So an engine should plan each load right after its lookup. If a slot
is missing when a load is planned, only that load fails.

Only :class:`Grants` changes a request's phase, a copy's grants and the use of the pin budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import ClassVar, Final, NamedTuple, TypeAlias

from kvtier.keys import ChunkKey, group_part, is_single_group
from kvtier.manager.copies import by_group
from kvtier.manager.storage_jobs import StorageJobs
from kvtier.manager.tier_stack import TierStack
from kvtier.policies import ChunkCopy, CopyState
from kvtier.policies.base import RequestTerms, is_evictable
from kvtier.types import JobId

__all__ = ["DEFERRED", "Grants", "LookupPhase", "RequestState", "SharedAccess"]

_RECHECK_STEPS: Final = 16
_RESIDENT = CopyState.RESIDENT


_BudgetUse: TypeAlias = tuple[int, int, int]
"""Three counts: grant changes so far, RAM slots of direct loads and of late promotions."""


class LookupPhase:
    """The phases of a request between its first lookup and its load."""

    OPEN: ClassVar[int] = 0
    """Lookups see every tier."""
    QUEUED: ClassVar[int] = 1
    """The request needs promotions and waits for its turn."""
    WAITING: ClassVar[int] = 2
    """The chunks of the request are on their way to RAM."""
    SETTLED: ClassVar[int] = 3
    """Lookups see RAM only: hits in RAM are pinned, other chunks are recomputed."""
    FAILED: ClassVar[int] = 4
    """A load of the request failed: every lookup is a miss until the request ends."""


DEFERRED: Final = (LookupPhase.QUEUED, LookupPhase.WAITING)
"""Phases in which a lookup has no result yet."""


class SharedAccess:
    """The state of a request's question to the shared tier."""

    UNKNOWN: ClassVar[int] = 0
    """The request has asked no question."""
    ASKED: ClassVar[int] = 1
    """The request waits for the answer."""
    READABLE: ClassVar[int] = 2
    """The tier has some of the request's chunks."""
    NONE: ClassVar[int] = 3
    """The request reads no chunk from the tier."""
    NOWHERE: ClassVar[int] = 4
    """No tier has the request's first chunk, so its next lookup is a miss."""


class RequestState:
    """The state of one request, until the request ends.

    Only :class:`Grants` changes the attributes from ``phase`` to ``refused_at``, except
    ``shared``.

    Attributes:
        req_id: The engine's id of the request.
        terms: The tiers that the request may use.
        phase: One of :class:`LookupPhase`.
        shared: One of :class:`SharedAccess`; written by
            :class:`~kvtier.manager.questions.Questions`.
        wanted: Chunks that the request waits for, in the order of its load.
        wanted_since_s: Time when the request was queued, in seconds.
        deferred_steps: Number of steps since the request entered its phase.
        looked_up_at: Number of the step of the last lookup or, if later, of the step that
            settled the request.
        granted: RAM copies that are pinned for the request.
        pending: Number of ``granted`` copies that are still incomplete.
        jobs: Promotion jobs of the request.
        refused_at: Use of the pin budget when the budget last refused the request; None without
            a refusal.
        refusals: Number of stores refused since the last accepted store.
        is_miss_counted: Whether the request's first miss was counted.
        has_kv: Whether the engine has computed or loaded KV for the request.
        is_stale: Whether some of the request's KV is older than a reset. If so, no chunk of the
            request is stored.
        has_gap: Whether an offered chunk was in no tier. If so, the engine computed all later
            chunks.
        tails: For each KV cache group, the last chunk that was stored or loaded, and the depth
            of this chunk.
    """

    def __init__(self, req_id: str, terms: RequestTerms) -> None:
        self.req_id = req_id
        self.terms = terms
        self.phase = LookupPhase.OPEN
        self.shared = SharedAccess.UNKNOWN
        self.wanted: list[ChunkKey] = []
        self.wanted_since_s = 0.0
        self.deferred_steps = 0
        self.looked_up_at = 0
        self.granted: dict[ChunkCopy, None] = {}
        self.pending = 0
        self.jobs: set[JobId] = set()
        self.refused_at: _BudgetUse | None = None
        self.refusals = 0
        self.is_miss_counted = False
        self.has_kv = False
        self.is_stale = False
        self.has_gap = False
        self.tails: dict[bytes, tuple[ChunkKey, int]] = {}

    @property
    def reads_shared(self) -> bool:
        """Whether the request may read chunks of the shared tier."""
        return self.shared == SharedAccess.READABLE

    def lose_blocks(self) -> None:
        """Record a preemption: the request's chunks must be loaded or computed again.

        ``has_kv`` does not change, because the engine does not report when the request has KV
        again.
        """
        self.tails.clear()
        self.has_gap = False
        self.is_stale = False
        self.shared = SharedAccess.UNKNOWN

    def invalidate(self) -> None:
        """Mark the request's KV, if any, as stale after a reset of the cache."""
        self.is_stale |= self.has_kv
        self.tails.clear()

    def extend(self, copies: Sequence[ChunkCopy]) -> None:
        """Record that ``copies``, sorted by group, follow the request's earlier chunks."""
        if not copies:
            return
        if is_single_group((copies[0].key, copies[-1].key)):
            self._extend_group(copies)
            return
        for part in by_group(copies):
            self._extend_group(part)

    def _extend_group(self, copies: Sequence[ChunkCopy]) -> None:
        """Record that ``copies`` follow the request's earlier chunks in the same group.

        The depth of a recovered chunk is unknown, and part of the prefix may be in the engine's
        own cache. So the new depth is the larger of two numbers. One is the depth of the last
        copy; the other is the depth of the earlier chunks plus the number of ``copies``. Chunks
        that were loaded and then offered count once.
        """
        last = copies[-1]
        group = group_part(last.key)
        depth, again = -1, 0
        if group in self.tails:
            tail, depth = self.tails[group]
            again = next((at for at, copy in enumerate(copies, 1) if copy.key == tail), 0)
        self.tails[group] = (last.key, max(last.depth, depth + len(copies) - again))


_Waiters: TypeAlias = tuple[RequestState, ...]


class _Reservation(NamedTuple):
    """RAM slots reserved for a load of this step.

    Attributes:
        fills: Number of slots that the load fills from slower tiers.
        reads: Resident RAM copies that the load reads.
    """

    fills: int
    reads: Sequence[ChunkCopy]

    @property
    def slots(self) -> int:
        """Number of available slots that the load will use."""
        return self.fills + sum(map(is_evictable, self.reads))


class Grants:
    """Tracks which requests wait for chunks, and which chunks are granted.

    Attributes:
        queued: Requests that wait for their turn, in the order in which they were queued.
        waiting: Requests with granted chunks on their way.
        settled: Requests whose granted chunks have all arrived or failed.
        granted: Number of RAM slots with granted chunks.
    """

    def __init__(self, stack: TierStack, jobs: StorageJobs) -> None:
        self._stack = stack
        self._ram = stack.ram
        self._jobs = jobs
        self._waiters: dict[ChunkCopy, _Waiters] = {}
        self.queued: dict[RequestState, None] = {}
        self.waiting: dict[RequestState, None] = {}
        self.settled: dict[RequestState, None] = {}
        self._members = {
            LookupPhase.QUEUED: self.queued,
            LookupPhase.WAITING: self.waiting,
            LookupPhase.SETTLED: self.settled,
        }
        self.granted = 0
        self._direct = 0  # RAM slots that direct loads in flight fill
        self._reserved: dict[RequestState, _Reservation] = {}
        self._changes = 0

    def __bool__(self) -> bool:
        return bool(self.queued or self.waiting or self.settled)

    # -- pin budget -------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        """The pin budget in RAM slots, reduced by the slots of late promotions."""
        return self._stack.limits.pin_budget - self._jobs.late_slots

    @property
    def budget_left(self) -> int:
        """Number of slots of :attr:`budget` that are neither used nor reserved."""
        reserved = sum([each.fills for each in self._reserved.values()])
        return self.budget - self.granted - self._direct - reserved

    @property
    def _budget_use(self) -> _BudgetUse:
        """A value that changes whenever the use of the pin budget changes."""
        return self._changes, self._direct, self._jobs.late_slots

    def fits(self, request: RequestState, slots: int) -> bool:
        """Return whether ``slots`` slots fit in the budget; if not, record a refusal."""
        fits = slots <= self.budget_left
        request.refused_at = None if fits else self._budget_use
        return fits

    def is_refused(self, request: RequestState) -> bool:
        """Return whether the pin budget still refuses ``request``.

        The answer is True while the use of the budget is the same as at the refusal. The caller
        then skips the request, because computing the cost of thousands of chunks is slow. Every
        few steps the answer is False, because evictions may change the cost.
        """
        if request.deferred_steps % _RECHECK_STEPS == 0:
            return False
        return request.refused_at == self._budget_use

    def reserve(self, request: RequestState, fills: int, reads: Sequence[ChunkCopy]) -> bool:
        """Reserve the RAM slots of a direct load until the load is planned or the step ends.

        Args:
            request: The request.
            fills: Number of slots that the load fills from slower tiers.
            reads: Resident RAM copies that the load reads.

        Returns:
            Whether enough slots were left. If not, there is no reservation.
        """
        if fills > self.budget_left:
            return False
        reservation = _Reservation(fills, reads)
        taken = sum([each.slots for each in self._reserved.values()])
        if reservation.slots > self._ram.available - taken:
            return False
        self._reserved[request] = reservation
        return True

    def reserve_reads(self, request: RequestState, reads: Sequence[ChunkCopy]) -> None:
        """Reserve the resident RAM copies ``reads`` for a load of this step."""
        self._reserved[request] = _Reservation(0, reads)

    def begin_load(self, request: RequestState | None, fills: int) -> None:
        """Replace the reservation and the grants of ``request`` by a planned load.

        Args:
            request: The request; None if ``begin_request`` was not called for it.
            fills: Number of RAM slots that the load fills from slower tiers.
        """
        self._direct += fills
        if request is not None:
            self._reserved.pop(request, None)
            self.release(request)

    def end_load(self, fills: int) -> None:
        """Record the end of a load that filled ``fills`` RAM slots."""
        self._direct -= fills

    # -- phases -----------------------------------------------------------------------------

    def record_lookup(self, request: RequestState) -> None:
        """Record a lookup of ``request``: end its reservation and renew its grants."""
        self._reserved.pop(request, None)
        request.looked_up_at = self._stack.step

    def enqueue(self, request: RequestState, keys: Iterable[ChunkKey]) -> None:
        """Queue ``request`` for the chunks that its load needs."""
        request.wanted = list(dict.fromkeys(keys))  # each chunk is granted once
        request.wanted_since_s = self._stack.ctx.now
        self._enter(request, LookupPhase.QUEUED)

    def await_arrival(self, request: RequestState) -> None:
        """Move ``request`` from the queue to the requests that wait for granted chunks."""
        request.wanted.clear()
        self._enter(request, LookupPhase.WAITING)
        if not request.pending:
            self._settle(request)

    def release(self, request: RequestState) -> None:
        """End the grants of ``request``, and cancel jobs that no other request needs."""
        if request.phase in (LookupPhase.OPEN, LookupPhase.FAILED):
            return  # neither has any
        if request.granted:
            self.withdraw(request, list(request.granted))
        request.pending = 0
        for job_id in request.jobs:
            record = self._jobs.find(job_id)
            if record is not None and not any(copy.grants for copy in record.destinations):
                self._jobs.cancel(job_id)
        request.jobs.clear()
        request.wanted.clear()
        request.refused_at = None
        self._enter(request, LookupPhase.OPEN)

    def fail(self, request: RequestState) -> None:
        """End the grants of ``request`` after a failed load; its later lookups are misses.

        Otherwise the request would be looked up and fail again while the cause lasts.
        """
        self.release(request)
        self._enter(request, LookupPhase.FAILED)
        request.tails.clear()  # the request offers its chunks again from the root

    def end_step(self) -> None:
        """End all reservations, and the waits and unused grants that exceed their limits.

        Promotions have deadlines. So only the wait for a chunk that a worker stores for another
        request can be too long. Unused grants end, because the engine may schedule their
        request only after requests that need the slots.
        """
        limits = self._stack.limits
        if self._reserved:
            self._reserved.clear()
        for request in self.queued:
            request.deferred_steps += 1
        for request in list(self.waiting):
            request.deferred_steps += 1
            if request.deferred_steps >= limits.max_arrival_steps:
                self._settle(request)
        if self.settled:
            oldest = self._stack.step - limits.max_idle_grant_steps
            for request in [each for each in self.settled if each.looked_up_at < oldest]:
                self.release(request)

    def clear(self) -> None:
        """Release every request, after a reset of the cache."""
        for request in [*self.queued, *self.waiting, *self.settled]:
            self.release(request)
        self._direct = 0
        self._reserved.clear()

    # -- grants -----------------------------------------------------------------------------

    def grant(
        self, request: RequestState, copies: Sequence[ChunkCopy], job_id: JobId | None = None
    ) -> None:
        """Pin ``copies`` for ``request``; each copy is resident or still being written to RAM.

        Args:
            request: The request.
            copies: RAM copies.
            job_id: The promotion job that fills ``copies``; None if no such job was planned for
                ``request``.
        """
        self._changes += 1
        if job_id is not None:
            request.jobs.add(job_id)
        coming = []
        for copy in copies:
            if not copy.grants:
                self.granted += 1
            copy.grants += 1
            if copy.state != _RESIDENT:
                coming.append(copy)
        self._ram.pin(copies)
        request.granted.update(dict.fromkeys(copies))
        if coming:
            request.pending += len(coming)
            self._change_waiters(coming, lambda others: (*others, request))

    def transfer(self, request: RequestState, copies: Sequence[ChunkCopy]) -> bool:
        """Replace the grants of ``copies`` by pins of a load.

        Returns:
            Whether the request's grants were exactly ``copies``, all of them complete. If not,
            nothing has changed.
        """
        granted = request.granted
        if len(granted) != len(copies) or request.pending or granted.keys() != set(copies):
            return False
        self._changes += 1
        for copy in copies:
            copy.grants = grants = copy.grants - 1
            if not grants:
                self.granted -= 1
        granted.clear()
        return True

    def withdraw(self, request: RequestState, copies: Sequence[ChunkCopy]) -> None:
        """End the grants of ``copies`` to ``request``."""
        self._changes += 1
        for copy in copies:
            del request.granted[copy]
        if request.pending:
            coming = [copy for copy in copies if copy.state != _RESIDENT]
            request.pending -= len(coming)
            self._change_waiters(
                coming, lambda others: tuple(each for each in others if each is not request)
            )
        for copy in copies:
            copy.grants -= 1
            if not copy.grants:
                self.granted -= 1
        self._ram.unpin(copies)

    def withdraw_from_all(self, copy: ChunkCopy) -> None:
        """End every grant of ``copy``, which is resident and about to be dropped."""
        for request in (*self.waiting, *self.settled):
            if copy in request.granted:
                self.withdraw(request, (copy,))

    def record_missing(self, copy: ChunkCopy) -> None:
        """End all grants of a copy that failed or did not arrive in time."""
        for request in self._waiters.pop(copy, ()):
            del request.granted[copy]
            self._reduce_pending(request, 1)
        if copy.grants:
            self._changes += 1
            self._ram.unpin([copy] * copy.grants)
            copy.grants = 0
            self.granted -= 1

    def record_arrived(self, copies: Sequence[ChunkCopy]) -> None:
        """Record that ``copies`` arrived; settle the requests that wait for no other chunk."""
        if not self._waiters:
            return
        waiting = list(map(self._waiters.pop, copies, repeat(())))
        if waiting and waiting.count(waiting[0]) == len(waiting):
            for request in waiting[0]:
                self._reduce_pending(request, len(waiting))
            return
        by_id = {id(waiters): waiters for waiters in waiting}
        for each, chunks in Counter(map(id, waiting)).items():
            for request in by_id[each]:
                self._reduce_pending(request, chunks)

    # -- internals --------------------------------------------------------------------------

    def _enter(self, request: RequestState, phase: int) -> None:
        """Move ``request`` to ``phase``. Only this method changes phases."""
        members = self._members.get(request.phase)
        if members is not None:
            del members[request]
        if request.phase == LookupPhase.QUEUED or phase == LookupPhase.OPEN:
            request.deferred_steps = 0
        request.phase = phase
        members = self._members.get(phase)
        if members is not None:
            members[request] = None

    def _settle(self, request: RequestState) -> None:
        """Move ``request`` to phase ``SETTLED``, in which lookups search only RAM."""
        request.looked_up_at = self._stack.step
        self._enter(request, LookupPhase.SETTLED)

    def _reduce_pending(self, request: RequestState, chunks: int) -> None:
        request.pending -= chunks
        if not request.pending and request.phase == LookupPhase.WAITING:
            self._settle(request)

    def _change_waiters(
        self, copies: Sequence[ChunkCopy], change: Callable[[_Waiters], _Waiters]
    ) -> None:
        """Apply ``change`` to the requests that wait for each of ``copies``.

        Chunks with the same waiting requests share one tuple of requests, before and after the
        change. So ``change`` is called once per tuple, not once per chunk.
        """
        waiters = list(map(self._waiters.get, copies, repeat(())))
        if not any(waiters):
            self._waiters.update(dict.fromkeys(copies, change(())))
            return
        changed: dict[int, tuple[_Waiters, _Waiters]] = {}
        for copy, before in zip(copies, waiters, strict=True):
            # The old tuple is kept, so that no other tuple gets its id.
            _, after = changed.get(id(before)) or changed.setdefault(
                id(before), (before, change(before))
            )
            if after:
                self._waiters[copy] = after
            else:
                del self._waiters[copy]
