"""The manager of all tiers: decides where every chunk is, and moves no bytes.

The manager knows the state of all tiers and answers the engine's scheduler. It does no I/O,
never waits and never reads a clock. It returns :class:`~kvtier.types.Job` values. The caller
runs these jobs and passes their :class:`~kvtier.types.TransferResult` values back. So a live
engine and a simulator use the same class.

Life of a chunk: ``prepare_store`` gives the chunk a RAM slot, and the workers fill the slot.
``complete_store`` makes the chunk a hit if the workers recorded that its bytes are whole. The
:class:`~kvtier.manager.demote.Demoter` then copies the chunk to slower tiers. If a later
request finds the chunk only in a slower tier, the :class:`~kvtier.manager.promote.Promoter`
promotes it to RAM and pins it for that request. ``prepare_load`` pins the chunk until
``complete_load``.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from kvtier.keys import ChunkKey
from kvtier.manager.cost_model import CostModel
from kvtier.manager.demote import Demoter
from kvtier.manager.direct import DirectLoads
from kvtier.manager.grants import (
    DEFERRED,
    Grants,
    LookupPhase,
    RequestState,
    SharedAccess,
)
from kvtier.manager.hits import GroupReach, HitRules, Prompt
from kvtier.manager.load import Loader, LoadPlan
from kvtier.manager.lookup import HitLookup
from kvtier.manager.promote import Promoter
from kvtier.manager.quarantine import Quarantine
from kvtier.manager.questions import Questions
from kvtier.manager.reports import ManagerSnapshot, ResidencyEvent
from kvtier.manager.storage_jobs import StorageJobs
from kvtier.manager.store import NOTHING_TO_STORE, StorePlan, Storer
from kvtier.manager.tier import TierState
from kvtier.manager.tier_stack import GdsSource, ManagerLimits, SlotStatus, TierStack
from kvtier.policies import Admission, ChunkCopy, Placement
from kvtier.policies.base import NO_TERMS, NoVictimError, RequestTerms
from kvtier.types import Job, JobId, Outcome, TransferResult

__all__ = ["TieredOffloadingManager"]

_depth_of = operator.attrgetter("depth")


class TieredOffloadingManager:
    """Decides where the chunks of one engine are. Not thread-safe; one thread calls it.

    Args:
        tiers: The tiers, fastest first; index 0 is RAM.
        placement: Decides what moves between tiers.
        conditions: The conditions on writes to slower tiers, in order. Each condition sees only
            the chunks that the earlier conditions admitted.
        limits: Bounds to keep.
        slot_status: The workers' reports about RAM slots.
        record_events: Whether the caller calls :meth:`take_events`.
        track_reuse: Whether the caller calls :meth:`take_reuse_gaps`.
        cost_model: Decides whether to load chunks or compute them; if omitted, every hit is
            loaded.
        groups: For each KV cache group, the part of a prefix that a hit needs.
        counting_group: Index of the KV cache group used to count tokens.
        gds: Reports which slots of one tier the workers can read; None without GDS reads.
    """

    def __init__(  # noqa: PLR0913 - one keyword for each part
        self,
        tiers: Sequence[TierState],
        *,
        placement: Placement,
        conditions: Sequence[Admission] = (),
        limits: ManagerLimits,
        slot_status: SlotStatus,
        record_events: bool = False,
        track_reuse: bool = True,
        cost_model: CostModel | None = None,
        groups: Sequence[GroupReach] = (GroupReach(chunk_tokens=1),),
        counting_group: int = 0,
        gds: GdsSource | None = None,
    ) -> None:
        self._stack = stack = TierStack(
            tiers,
            placement=placement,
            conditions=conditions,
            limits=limits,
            slot_status=slot_status,
            record_events=record_events,
            track_reuse=track_reuse,
            cost_model=cost_model
            or CostModel(tiers=len(tiers), chunk_nbytes=1, chunk_tokens=0),
            counting_group=counting_group,
            gds=gds,
        )
        self._jobs = StorageJobs(stack)
        self._grants = Grants(stack, self._jobs)
        self._demoter = Demoter(stack, self._jobs)
        self._promoter = Promoter(stack, self._jobs, self._grants)
        rules = HitRules(groups)
        self._questions = Questions(stack, self._jobs, rules)
        self._loader = Loader(stack, self._grants, self._demoter)
        self._direct = DirectLoads(stack, self._grants, self._promoter, self._loader)
        self._lookup = HitLookup(stack, rules, self._grants, self._direct, self._questions)
        self._storer = Storer(stack, self._grants, self._demoter)
        self._quarantine = Quarantine(stack, self._jobs)
        self._requests: dict[str, RequestState] = {}

    # -- requests ---------------------------------------------------------------------------

    def begin_request(self, req_id: str, terms: RequestTerms = NO_TERMS) -> None:
        """Begin to track a request. Idempotent."""
        if req_id not in self._requests:
            self._begin(req_id, terms)

    def end_request(self, req_id: str) -> None:
        """Forget a request and release its grants; loads in flight stay pinned."""
        request = self._requests.pop(req_id, None)
        if request is not None:
            self._grants.release(request)

    def fail_request(self, req_id: str) -> None:
        """Make every further lookup of a request a miss, until the request ends."""
        request = self._requests.get(req_id)
        if request is not None:
            self._grants.fail(request)
            request.shared = SharedAccess.NONE

    # -- lookup and load --------------------------------------------------------------------

    def lookup(self, req_id: str, prompt: Prompt) -> int | None:
        """Return how many tokens a waiting request can load beyond ``prompt.local_tokens``.

        Call ``prepare_load`` for the request in the same step, before any other load or store
        is planned: other plans may evict the chunks.

        Returns:
            The number of tokens; None while chunks are being promoted. Then look up again in
            the next step.
        """
        request = self._requests.get(req_id) or self._begin(req_id, NO_TERMS)
        return self._lookup.lookup(request, prompt)

    # Three methods for an engine that looks up chunk by chunk.

    def residence(self, key: ChunkKey, req_id: str) -> int | None:
        """Return the index of the fastest tier that can serve ``key``; None for a miss.

        A chunk in RAM (0) stays there until the step ends.
        """
        request = self._requests.get(req_id) or self._begin(req_id, NO_TERMS)
        return self._lookup.residence(request, key)

    def is_deferred(self, req_id: str) -> bool:
        """Return whether the request waits for chunks. If so, a lookup has no result yet."""
        request = self._requests.get(req_id)
        return request is not None and request.phase in DEFERRED

    def is_asking(self, req_id: str) -> bool:
        """Return whether the request waits for an answer of the shared tier."""
        request = self._requests.get(req_id)
        return request is not None and request.shared == SharedAccess.ASKED

    def fetch(self, keys: Iterable[ChunkKey], req_id: str) -> None:
        """Defer a request until ``keys``, all chunks of its hit, are in RAM."""
        request = self._requests.get(req_id)
        if request is not None and request.phase == LookupPhase.OPEN:
            self._grants.enqueue(request, keys)

    def prepare_load(self, keys: Sequence[ChunkKey], req_id: str) -> LoadPlan:
        """Pin ``keys``, found by a lookup of this step, and return the plan of their load.

        With ``limits.direct_loads`` some chunks may be in slower tiers. Their promotion jobs
        are planned with the load. Call :meth:`take_jobs` at once, because the workers wait for
        these jobs.

        Raises:
            KeyError: Loads are not direct, and a key is not resident because it was not looked
                up in this step. Loading another chunk instead would give wrong tokens.
        """
        request = self._requests.get(req_id)
        if request is not None:
            request.has_kv = True
        terms = NO_TERMS if request is None else request.terms
        copies = self._stack.ram.resident(keys)
        with self._stack.naming_request(req_id, terms):
            if len(copies) == len(keys):
                return self._loader.prepare(keys, copies, req_id, request)
            return self._direct.prepare(keys, copies, req_id, request)

    def complete_load(
        self,
        req_id: str,
        load_id: int | None = None,
        *,
        failed_reads: Mapping[int, Outcome] = MappingProxyType({}),
    ) -> None:
        """Complete a load of ``req_id``, even if the request has ended.

        Chunks that a worker could not load are dropped from RAM, and every later lookup of the
        request is a miss. A load planned before a reset is ignored.

        Args:
            req_id: The request.
            load_id: ``load_id`` of the load's plan; None for the oldest load of the request, if
                the engine does not distinguish its loads.
            failed_reads: Outcome of each failed GDS read, by the chunk's position in the load.
        """
        self._loader.complete(req_id, load_id, failed_reads)

    # -- store ------------------------------------------------------------------------------

    def prepare_store(
        self, keys: Sequence[ChunkKey], req_id: str, *, is_last: bool = False
    ) -> StorePlan | None:
        """Allocate RAM slots for the ``keys`` that RAM lacks, evicting copies if needed.

        Offering a chunk counts as a use of its copy in RAM. If only some of the new chunks fit,
        the last ones are refused, because a suffix is useless without its prefix.

        Args:
            keys: The chunks to store.
            req_id: The request.
            is_last: Whether the engine cannot offer the chunks again. The result is then never
                None.

        Returns:
            The plan, which may be empty; None if there are too few slots now. After None, no
            slot is allocated, and the engine should offer the chunks again in the next step.
        """
        request = self._requests.get(req_id)
        if request is not None:
            if request.is_stale or request.terms.stores_nothing:
                return NOTHING_TO_STORE
            request.has_kv = True
        terms = NO_TERMS if request is None else request.terms
        with self._stack.naming_request(req_id, terms):
            return self._storer.prepare(keys, request, is_last=is_last)

    def complete_store(self, keys: Collection[ChunkKey]) -> None:
        """End a store; the ``keys`` that every worker stored completely become hits.

        Keys that are not being stored are ignored.
        """
        self._storer.complete(keys)

    # -- retention --------------------------------------------------------------------------

    def retain(self, keys: Iterable[ChunkKey], until: float) -> int:
        """Protect the resident RAM copies of ``keys`` from eviction until time ``until``.

        Retained chunks count against ``limits.retained``, and a reset releases them. They are
        released early only if a store or a promotion has waited and finds no other slots.

        Args:
            keys: Chunks; beyond the quota, the last chunks of prefixes are refused.
            until: Seconds on the clock of :meth:`end_step`.

        Returns:
            The number of chunks retained at least until ``until``.
        """
        members = self._stack.ram.copies
        copies = [copy for copy in map(members.get, keys) if copy is not None]
        copies.sort(key=_depth_of)
        return self._stack.retention.retain(copies, until)

    # -- steps and storage jobs -------------------------------------------------------------

    def end_step(
        self, *, started: Iterable[str] = (), preempted: Iterable[str] = (), now: float = 0.0
    ) -> None:
        """Close a scheduling step: grant, promote, demote and evict.

        Args:
            started: Requests that were scheduled for the first time in this step.
            preempted: Requests that lost their GPU blocks and will be looked up again.
            now: Seconds on a monotonic clock, for policies.
        """
        stack = self._stack
        stack.step += 1
        stack.ctx.now = now
        for req_id in started:
            self._start(req_id)
        for req_id in preempted:
            self._preempt(req_id)
        if stack.epoch:
            self._quarantine.end_step()
        for retention in stack.retentions:
            if retention:
                retention.expire(now)
        self._grants.end_step()
        if self._grants.queued:
            self._promoter.end_step()
        self._demoter.end_step()
        stack.events.end_step()
        if stack.tracks_reuse:
            stack.end_reuse_step()

    @property
    def can_skip_step(self) -> bool:
        """Whether :meth:`end_step` has no work until another method is called.

        Expired retained chunks do not count as work, because any later step can release them.
        A question does not count either, because nothing happens until its result is applied.
        """
        stack = self._stack
        return not (
            self._demoter.queued
            or len(self._jobs)  # late jobs too: their slots become free when they end
            or self._quarantine
            or self.has_output
            or self._grants
            or self._demoter.is_reclaiming
            or stack.events.is_freeing
            or any(gaps.is_changed for gaps in stack.gaps)
        )

    def has_work(self) -> bool:
        """Return whether steps are needed even if no request is running."""
        return bool(self._demoter.queued or self._jobs.has_awaited or self._quarantine)

    def set_out_of_service(self, tiers: Collection[int]) -> None:
        """Set the indices of the slower tiers that are out of service and must not be read.

        Chunks in no other tier are misses; promotions in flight fail on their own.
        Do not call this between a lookup and the ``prepare_load`` that relies on the lookup.
        """
        self._stack.out_of_service = tiers

    @property
    def has_output(self) -> bool:
        """Whether there are jobs, cancellations or corrupt slots to take."""
        return bool(self._stack.corrupt) or self._jobs.has_output

    def take_jobs(self) -> list[Job]:
        """Return the storage jobs planned since the last call, for the engine to run."""
        return self._jobs.take_planned()

    def take_cancels(self) -> list[JobId]:
        """Return the ids of jobs that requests no longer need; cancelling them is optional."""
        return self._jobs.take_cancelled()

    def take_corrupt(self) -> list[tuple[int, int]]:
        """Return corrupt slots, as (tier index, slot); a restart must not recover them.

        Handle these slots before the jobs of the next :meth:`take_jobs`, which may reuse them.
        """
        return self._stack.take_corrupt()

    def apply(self, result: TransferResult) -> None:
        """Apply the result of a storage job; results of unknown jobs are ignored.

        Do not call this between a lookup and the ``prepare_load`` that relies on the lookup,
        because this call evicts victims that arrived in a slower tier.
        """
        if self._questions.apply(result):
            return
        stack = self._stack
        record = self._jobs.find(result.job_id)
        if record is None:
            return
        if record.is_promotion:
            timeout_s = stack.limits.load_timeout_s
            stack.cost_model.record_result(result, timeout_s=timeout_s, now=stack.ctx.now)
        if record.epoch != stack.epoch:
            self._quarantine.apply(record, result)
        elif record.is_promotion:
            moved = self._promoter.apply(record, result)
            self._demoter.add_sole_copies(stack.ram, moved)
        else:
            self._demoter.apply(record, result)
        if result.settled:
            self._jobs.remove(result.job_id)

    def flush(self) -> None:
        """Plan jobs that demote every dirty chunk in RAM, before an orderly shutdown."""
        self._demoter.flush_all()

    # -- reports ----------------------------------------------------------------------------

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Record that a step of ``seconds`` seconds computed ``tokens`` prompt tokens.

        The cost model uses the duration, unless the configuration sets the time per token.
        """
        self._stack.cost_model.record_prefill(tokens, seconds, self._stack.ctx.now)

    @property
    def cost_model(self) -> CostModel:
        """The cost model, which decides whether to load chunks or compute them."""
        return self._stack.cost_model

    def take_events(self) -> list[ResidencyEvent]:
        """Return the oldest residency events that were not taken yet.

        A listener that replays all events knows the chunks of each tier. The removal of a chunk
        precedes the arrival of the next chunk in its slot. A call returns some thousand chunks;
        :attr:`has_events` tells whether there are more.
        """
        return self._stack.events.take()

    @property
    def has_events(self) -> bool:
        """Whether :meth:`take_events` has events to return."""
        return bool(self._stack.events)

    def take_reuse_gaps(self) -> list[list[float]]:
        """Return, for each tier, the seconds between a chunk's eviction and its next lookup.

        Only gaps since the last call are returned. A large tier is sampled.
        """
        return [gaps.take() for gaps in self._stack.gaps]

    @property
    def requests(self) -> int:
        """Number of requests in progress."""
        return len(self._requests)

    @property
    def has_worker_jobs(self) -> bool:
        """Whether a prepared load or store is not complete yet."""
        return bool(self._loader or self._storer)

    @property
    def dropped(self) -> list[int]:
        """Number of new chunks dropped because a slower tier was too slow, per tier."""
        return [tier.counters.dropped for tier in self._stack.tiers]

    @property
    def policy_errors(self) -> list[NoVictimError]:
        """The error of each eviction policy that was replaced by ``lru``."""
        return [tier.policy_error for tier in self._stack.tiers if tier.policy_error]

    def snapshot(self) -> ManagerSnapshot:
        """Return the current state of the manager and its tiers."""
        stack = self._stack
        ram, *slower = stack.tiers
        return ManagerSnapshot(
            tiers=[
                ram.snapshot(quarantined=len(self._quarantine)),
                *(tier.snapshot() for tier in slower),
            ],
            requests=len(self._requests),
            waiting=len(self._grants.queued) + len(self._grants.waiting),
            granted=self._grants.granted,
            retained=len(stack.retention),
            jobs=len(self._jobs),
            cost_model=stack.cost_model.figures(),
        )

    # -- recovery and reset -----------------------------------------------------------------

    def recover(self, tier: int, chunks: Iterable[tuple[ChunkKey, int]]) -> int:
        """Make recovered chunks hits in ``tier``.

        Call it for the slowest tier first, because chunks that no slower tier has may become
        dirty.

        Args:
            tier: Index of a slower tier.
            chunks: Keys and slots, least recently used first. Keys and slots are unique.

        Returns:
            The number of recovered chunks.
        """
        stack = self._stack
        state = stack.tiers[tier]
        copies = [ChunkCopy(key, slot) for key, slot in chunks]
        state.slots.take(copy.slot for copy in copies)
        state.add_resident(copies, stack.ctx)
        stack.events.add(tier, [copy.key for copy in copies], removed=False)
        self._demoter.add_recovered(state, copies)
        return len(copies)

    def retain_recovered(self, tier: int, slots: Mapping[int, float]) -> None:
        """Protect recovered chunks of a slower tier from eviction.

        Args:
            tier: Index of the tier.
            slots: For the slot of each chunk, the time when the protection ends, in seconds on
                the clock of :meth:`end_step`.
        """
        copies = {copy.slot: copy for copy in self._stack.tiers[tier].copies.values()}
        for slot, until in slots.items():
            if slot in copies:
                self._stack.retentions[tier].retain((copies[slot],), until)

    def reset(self) -> None:
        """Make every chunk in every tier a miss, because weights may have changed.

        Slots that a storage job or a worker may still touch stay unused until those jobs have
        ended. Loads and stores prepared before the reset need no ``complete_*`` call. A request
        with KV from before the reset stores nothing until it loses its GPU blocks, because that
        KV may be outdated.
        """
        stack = self._stack
        stack.epoch += 1
        for request in self._requests.values():
            request.invalidate()
        self._grants.clear()
        self._questions.clear()
        for retention in stack.retentions:
            retention.clear()
        self._demoter.clear()
        self._quarantine.reset([*self._loader.clear(), *self._storer.clear()])
        for gaps in stack.gaps:
            gaps.clear()
        self.take_cancels()
        for job in self.take_jobs():  # the engine never took them, so no result follows
            self.apply(TransferResult(job.job_id, [Outcome.CANCELLED] * len(job.keys)))

    def _start(self, req_id: str) -> None:
        request = self._requests.get(req_id)
        if request is not None:
            request.has_kv = True
            self._grants.release(request)

    def _preempt(self, req_id: str) -> None:
        request = self._requests.get(req_id)
        if request is not None:
            self._grants.release(request)
            request.lose_blocks()

    def _begin(self, req_id: str, terms: RequestTerms) -> RequestState:
        if terms.store_tiers is not None:
            self._stack.restricts_stores = True
        request = self._requests[req_id] = RequestState(req_id, terms)
        return request
