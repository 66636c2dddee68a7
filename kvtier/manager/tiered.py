"""The composite manager: decides where every chunk is, and never touches one.

It keeps the books of all tiers and answers the engine's scheduler from them. It does no I/O,
never waits and never reads a clock; what should happen leaves as :class:`~kvtier.types.Job`
values, what happened comes back as :class:`~kvtier.types.TransferResult` values. The same
object therefore serves a live engine and a simulator.

Life of a chunk: ``prepare_store`` gives it a RAM slot, the workers fill it,
``complete_store`` asks the workers' own record whether they did and only then makes it a hit.
From there the :class:`~kvtier.manager.demoter.Demoter` copies it down. A later request that
finds it below waits while the :class:`~kvtier.manager.promoter.Promoter` brings it up and
keeps it for that request. ``prepare_load`` pins it until ``complete_load``.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from kvtier.keys import ChunkKey
from kvtier.manager.cost_model import CostModel
from kvtier.manager.demoter import Demoter
from kvtier.manager.demotion_jobs import DemotionJobs
from kvtier.manager.events import ResidencyEvent
from kvtier.manager.grants import Grants
from kvtier.manager.hits import GroupReach, HitRules, Prompt
from kvtier.manager.ladder import Ladder
from kvtier.manager.loader import Loader
from kvtier.manager.lookup import HitLookup
from kvtier.manager.plans import (
    NOTHING_TO_STORE,
    LoadPlan,
    ManagerLimits,
    ManagerSnapshot,
    SlotStatus,
    StorePlan,
)
from kvtier.manager.promoter import Promoter
from kvtier.manager.promotion_jobs import PromotionJobs
from kvtier.manager.quarantine import Quarantine
from kvtier.manager.requests import DEFERRED, Phase, RequestState
from kvtier.manager.reserves import Reserves
from kvtier.manager.storer import Storer
from kvtier.manager.tier import TierState
from kvtier.policies import ChunkCopy, CopyState, Placement
from kvtier.policies.terms import NO_TERMS, RequestTerms
from kvtier.types import Job, JobId, Outcome, TransferResult, Why

__all__ = ["TieredOffloadingManager"]

_depth_of = operator.attrgetter("depth")
_RESIDENT = CopyState.RESIDENT
_PROMOTE = Why.PROMOTE


class TieredOffloadingManager:
    """Bookkeeping of a ladder of tiers for one engine. Not thread-safe; one thread calls it.

    Args:
        tiers: The tiers, fastest first; index 0 is RAM.
        placement: Decides what crosses tiers.
        limits: Bounds to keep to.
        slot_status: What the workers say about RAM slots.
        record_events: Whether :meth:`take_events` has anything to return.
        track_reuse: Whether :meth:`take_reuse_gaps` has.
        cost_model: Says which loads are worth their time; all of them when omitted.
        groups: What each KV cache group needs of a prefix.
        counting_group: Index of the KV cache group whose chunks stand for tokens.
    """

    def __init__(  # noqa: PLR0913 - one keyword for each part
        self,
        tiers: Sequence[TierState],
        *,
        placement: Placement,
        limits: ManagerLimits,
        slot_status: SlotStatus,
        record_events: bool = False,
        track_reuse: bool = True,
        cost_model: CostModel | None = None,
        groups: Sequence[GroupReach] = (GroupReach(chunk_tokens=1),),
        counting_group: int = 0,
    ) -> None:
        self._ladder = ladder = Ladder(
            tiers,
            placement=placement,
            limits=limits,
            slot_status=slot_status,
            record_events=record_events,
            track_reuse=track_reuse,
            cost_model=cost_model
            or CostModel(tiers=len(tiers), chunk_nbytes=1, chunk_tokens=0),
            counting_group=counting_group,
        )
        self._ram = ladder.ram
        self._resident = self._ram.copies
        self._grants = Grants(ladder)
        self._promotions = PromotionJobs(ladder, self._grants)
        self._promoter = Promoter(ladder, self._grants, self._promotions)
        self._lookup = HitLookup(ladder, HitRules(groups), self._grants, self._promoter)
        self._demotions = DemotionJobs(ladder)
        self._reserves = Reserves(ladder, self._demotions)
        self._demoter = Demoter(ladder, self._demotions, self._reserves)
        self._storer = Storer(ladder, self._grants, self._demoter)
        self._loader = Loader(
            ladder,
            grants=self._grants,
            lookup=self._lookup,
            promotions=self._promotions,
            promoter=self._promoter,
            demoter=self._demoter,
        )
        self._quarantine = Quarantine(ladder)
        self._requests: dict[str, RequestState] = {}

    # -- requests ---------------------------------------------------------------------------

    def begin_request(self, req_id: str, terms: RequestTerms = NO_TERMS) -> None:
        """Start remembering a request, on its terms; idempotent."""
        if req_id not in self._requests:
            self._begin(req_id, terms)

    def end_request(self, req_id: str) -> None:
        """Forget a request and what was kept for it; loads in flight stay pinned."""
        request = self._requests.pop(req_id, None)
        if request is not None:
            self._promoter.release(request)

    # -- lookup and load --------------------------------------------------------------------

    def lookup(self, req_id: str, prompt: Prompt) -> int | None:
        """Return how many tokens after the local ones can be loaded for a waiting request.

        To be followed by its ``prepare_load`` in the same step, before that of another request:
        until then nothing is evicted.

        Returns:
            The tokens; None if the request is to ask again at the next step, because chunks are
            on their way to RAM for it.
        """
        request = self._requests.get(req_id) or self._begin(req_id, NO_TERMS)
        return self._lookup.lookup(request, prompt)

    # For an engine that asks chunk by chunk, and says at the end of a step what it found.

    def residence(self, key: ChunkKey, req_id: str) -> int | None:
        """Return the index of the fastest tier that can serve ``key``; None for a miss.

        0 means whole in RAM. It stays there until the step ends.
        """
        request = self._requests.get(req_id) or self._begin(req_id, NO_TERMS)
        return self._lookup.residence(request, key)

    def is_deferred(self, req_id: str) -> bool:
        """Return whether the request waits for chunks, so that asking for it is no use."""
        request = self._requests.get(req_id)
        return request is not None and request.phase in DEFERRED

    def fetch(self, keys: Iterable[ChunkKey], req_id: str) -> None:
        """Defer a request until ``keys``, all that it found, are in RAM."""
        request = self._requests.get(req_id)
        if request is not None and request.phase == Phase.ASKING:
            self._promoter.enqueue(request, keys)

    def prepare_load(self, keys: Sequence[ChunkKey], req_id: str) -> LoadPlan:
        """Pin ``keys``, which a lookup of this step found, and return where they are.

        With ``limits.streams`` some may be in slower tiers. The jobs that promote them are
        planned with the load. Take them at once: the workers will wait for them.

        Raises:
            KeyError: A key is not resident and ``limits.streams`` is off: the caller did not
                look it up in this step. Loading another chunk in its place would be a wrong
                token.
        """
        request = self._requests.get(req_id)
        if request is not None:
            request.has_kv = True
        self._ladder.serve(req_id, request)
        return self._loader.prepare(keys, req_id, request)

    def fail_request(self, req_id: str) -> None:
        """Answer MISS to ``req_id`` until it ends: its engine was told of a hit in vain."""
        request = self._requests.get(req_id)
        if request is not None:
            self._promoter.give_up(request)

    def complete_load(self, req_id: str) -> None:
        """End the oldest load of ``req_id``, which may have ended itself.

        Chunks that a worker recorded it could not load leave RAM, and the request is answered
        MISS from now on. A load of before a reset is ignored.
        """
        self._loader.complete(req_id, self._requests.get(req_id))

    # -- store ------------------------------------------------------------------------------

    def prepare_store(self, keys: Sequence[ChunkKey], req_id: str) -> StorePlan | None:
        """Give RAM slots to those of ``keys`` that are not in RAM yet, evicting as needed.

        Being offered again counts as a use of the chunks that are there. Head first: when only
        some fit it is the tail that is refused, for a suffix without its prefix cannot be used.

        Returns:
            What to store, perhaps nothing; None when there is no room *now* and asking again at
            the next step may help. None changes nothing.
        """
        request = self._requests.get(req_id)
        if request is not None:
            if request.is_stale:
                return NOTHING_TO_STORE
            request.has_kv = True
        self._ladder.serve(req_id, request)
        return self._storer.prepare(keys, request)

    def complete_store(self, keys: Collection[ChunkKey]) -> None:
        """Make stored chunks hits, if every worker recorded that their bytes are whole.

        A key that is not being stored is ignored.
        """
        self._storer.complete(keys)

    # -- keeping ----------------------------------------------------------------------------

    def retain(self, keys: Iterable[ChunkKey], until: float) -> int:
        """Keep those of ``keys`` that are whole in RAM there until a deadline.

        They count against ``limits.retained``; a reset lets go of them. They are released
        early only for a store or a promotion that waited its time and found no other room.

        Args:
            keys: Chunks; when the quota ends it is the tails of prefixes that are refused.
            until: Seconds on the clock of :meth:`end_step`.

        Returns:
            How many are kept at least until then.
        """
        found = [copy for copy in map(self._resident.get, keys) if copy is not None]
        found.sort(key=_depth_of)
        return self._ladder.retention.keep(found, until)

    # -- steps and storage jobs -------------------------------------------------------------

    def end_step(
        self, *, started: Iterable[str] = (), preempted: Iterable[str] = (), now: float = 0.0
    ) -> None:
        """Close a scheduling step: grant, demote, reclaim.

        Args:
            started: Requests that were scheduled for the first time in this step.
            preempted: Requests that lost their GPU blocks and will be looked up again.
            now: Seconds on a monotonic clock, for policies.
        """
        ladder = self._ladder
        ladder.step += 1
        ladder.ctx.now = now
        for req_id in started:
            request = self._requests.get(req_id)
            if request is not None:
                request.has_kv = True
                self._promoter.release(request)
        for req_id in preempted:
            self._preempt(req_id)
        if ladder.epoch:
            self._quarantine.release()
        if ladder.limits.retained:
            ladder.retention.expire(now)
        self._promoter.end_step()
        self._lookup.end_step()
        self._demoter.flush()
        if ladder.tracks_reuse:
            self._note_reuse(now)

    @property
    def is_idle(self) -> bool:
        """Whether :meth:`end_step` would find nothing to do until something else is called."""
        ladder = self._ladder
        return not (
            self._demoter.queued
            or len(ladder.ledger)  # late jobs too: their slots are free when they end
            or self._quarantine
            or self.has_output
            or self._promoter.is_busy
            or self._reserves.are_low
            or len(ladder.retention)
            or any(gaps.busy for gaps in ladder.gaps)
        )

    def set_out_of_service(self, tiers: Collection[int]) -> None:
        """Name the slower tiers, by index, that nothing is to be read from for now.

        What only they have is a miss, and a chunk on its way from one fails by itself. Not to
        be called between a lookup and the ``prepare_load`` that relies on it.
        """
        self._ladder.out_of_service = tiers

    @property
    def has_output(self) -> bool:
        """Whether there are jobs, cancellations or corrupt slots to take."""
        return bool(self._ladder.corrupt) or self._ladder.ledger.has_output

    def take_jobs(self) -> list[Job]:
        """Return the storage jobs planned since the last call; the engine runs them."""
        return self._ladder.ledger.take_unsent()

    def take_cancels(self) -> list[JobId]:
        """Return jobs that nobody needs any more; dropping them is optional."""
        return self._ladder.ledger.take_cancels()

    def take_corrupt(self) -> list[tuple[int, int]]:
        """Return (tier index, slot) pairs whose content a restart must not bring back.

        To be acted on before the jobs of the next :meth:`take_jobs`, which may reuse the slots.
        """
        return self._ladder.take_corrupt()

    def take_events(self) -> list[ResidencyEvent]:
        """Return the oldest residency events that were not taken yet.

        Replayed from the first one on they say what each tier has. A removal comes before what
        took the room. Some thousand chunks at a time: :attr:`has_events` says if there are
        more.
        """
        return self._ladder.events.take()

    @property
    def has_events(self) -> bool:
        """Whether :meth:`take_events` has anything to return."""
        return bool(self._ladder.events)

    def take_reuse_gaps(self) -> list[list[float]]:
        """Return, tier by tier, how long ago chunks had been evicted that were asked for again.

        In seconds, since the last call; of a large tier a sample.
        """
        return [gaps.take() for gaps in self._ladder.gaps]

    @property
    def requests(self) -> int:
        """Requests that began and did not end."""
        return len(self._requests)

    @property
    def dropped(self) -> list[int]:
        """New chunks, tier by tier, that it did not get because a disk did not keep up."""
        return [tier.counters.dropped for tier in self._ladder.tiers]

    def apply(self, result: TransferResult) -> None:
        """Take the outcome of a storage job into account; unknown jobs are ignored.

        Not to be called between a lookup and the ``prepare_load`` that relies on it: a victim
        that has arrived below leaves RAM here, though it was a hit until now.
        """
        ladder, ledger = self._ladder, self._ladder.ledger
        record = ledger.find(result.job_id)
        if record is None:
            return
        if record.why is _PROMOTE:
            timeout_s = ladder.limits.load_timeout_s
            ladder.cost_model.record_result(result, timeout_s=timeout_s, now=ladder.ctx.now)
        if record.epoch != ladder.epoch:
            self._quarantine.apply(record, result)
        elif record.why is _PROMOTE:
            self._reserves.adopt(self._ram, self._promotions.apply(record, result))
        else:
            arrived = self._demotions.apply(record, result)
            self._reserves.adopt(ladder.tiers[record.destination], arrived)
        if result.settled:
            ledger.close(result.job_id)

    @property
    def cost_model(self) -> CostModel:
        """Says which loads are worth their time."""
        return self._ladder.cost_model

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Note that the engine computed ``tokens`` prompt tokens in a step of ``seconds``.

        What a load is compared with, unless the configuration says what a token takes.
        """
        self._ladder.cost_model.record_prefill(tokens, seconds, self._ladder.ctx.now)

    def has_work(self) -> bool:
        """Return whether steps are needed although no request is running."""
        return bool(self._demoter.queued or self._ladder.ledger.active or self._quarantine)

    def flush(self) -> None:
        """Plan jobs that bring every dirty chunk down; for an orderly shutdown."""
        self._demoter.flush_all()

    # -- recovery, reset, figures -----------------------------------------------------------

    def recover(self, tier: int, chunks: Iterable[tuple[ChunkKey, int]]) -> int:
        """Make chunks that survived a restart hits in ``tier``, least recently used first.

        The slowest tier is to come first: what no slower one has may be owed to it.

        Args:
            tier: Index of a slower tier.
            chunks: Keys and slots; no key and no slot twice.

        Returns:
            How many there were.
        """
        state = self._ladder.tiers[tier]
        copies = [ChunkCopy(key, slot) for key, slot in chunks]
        state.slots.take(copy.slot for copy in copies)
        state.add_resident(copies, self._ladder.ctx)
        self._ladder.events.add(tier, [copy.key for copy in copies], removed=False)
        self._reserves.adopt_recovered(state, copies)
        return len(copies)

    def reset(self) -> None:
        """Make every chunk in every tier a miss: a new epoch, because weights may have changed.

        Slots that a storage job or a worker may still touch stay out of use until it is known
        to be over. No ``complete_*`` is expected for what was prepared before. A request that
        has KV of before the reset stores nothing any more unless it loses its blocks: an engine
        offers all of its chunks again, and those are what the reset was to get rid of.
        """
        self._ladder.epoch += 1
        for request in self._requests.values():
            request.is_stale |= request.has_kv
            request.granted.clear()
            request.jobs.clear()
            request.tails.clear()
        self._promoter.clear()
        for request in self._requests.values():
            request.pending = 0
            self._promoter.release(request)
        unsent = self.take_jobs()
        self._ladder.retention.clear()
        self._quarantine.evacuate(chain(self._loader.in_flight(), self._demoter.waiting()))
        self._loader.clear()
        self._storer.clear()
        self._demoter.clear()
        for gaps in self._ladder.gaps:
            gaps.clear()
        for job in unsent:
            # Never handed out, so nobody will report on it.
            self.apply(TransferResult(job.job_id, [Outcome.CANCELLED] * len(job.keys)))

    def snapshot(self) -> ManagerSnapshot:
        """Return the manager's figures now."""
        self._ram.quarantined = len(self._quarantine)
        return ManagerSnapshot(
            tiers=[tier.snapshot() for tier in self._ladder.tiers],
            requests=len(self._requests),
            waiting=sum(request.phase in DEFERRED for request in self._requests.values()),
            granted=self._grants.granted,
            retained=len(self._ladder.retention),
            jobs=len(self._ladder.ledger),
            cost_model=self._ladder.cost_model.figures(),
        )

    # -- internals --------------------------------------------------------------------------

    def _begin(self, req_id: str, terms: RequestTerms) -> RequestState:
        if terms.store_tiers is not None:
            self._ladder.restricts_stores = True
        request = self._requests[req_id] = RequestState(req_id, terms)
        return request

    def _note_reuse(self, now: float) -> None:
        for gaps in self._ladder.gaps:
            if gaps.busy:
                gaps.end_step(now)

    def _preempt(self, req_id: str) -> None:
        request = self._requests.get(req_id)
        if request is not None:
            self._promoter.release(request)
            # Its chunks will be loaded, or offered, from the root again.
            request.tails.clear()
            request.broken = False
            # Whether it has KV again is not said when it is scheduled again, so it still counts
            # as having some.
            request.is_stale = False
