"""The cache object that a scheduler calls. It joins the manager and a transfer engine.

The transfer engine moves chunks between tiers, on its own thread. The service runs in the
scheduler's thread, where an exception kills the engine and a wait stalls every request. So the
service only passes values. At the start and the end of a step, it passes the transfer engine's
results to the manager, and the manager's new jobs to the transfer engine. An unexpected error
is counted and treated as a miss, and the first error of each kind is logged.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Concatenate, Final, ParamSpec, TypeVar

from kvtier.connector.deadline import Deadline
from kvtier.connector.figures import EngineStatistics, collect_statistics
from kvtier.connector.hints import HintReader, TierNature
from kvtier.connector.notices import Notices
from kvtier.connector.protocols import RequestContext
from kvtier.connector.storage import Storage
from kvtier.connector.tier_jobs import TierJobs
from kvtier.connector.timing import LoadWaits, StepClock
from kvtier.connector.transfers import Transfers
from kvtier.keys import ChunkKey
from kvtier.logs import get_logger
from kvtier.manager import (
    NO_GENERATION,
    NO_SLOT,
    NOTHING_TO_STORE,
    LoadPlan,
    Prompt,
    ResidencyEvent,
    StorePlan,
)
from kvtier.types import Outcome

__all__ = ["CacheService"]

logger = get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_NOTICES_EVERY_S: Final = 1.0
_MAX_STEPS_WITH_EVENTS: Final = 8
_CLOSING_S: Final = 5.0
"""Seconds reserved for closing the tiers, after a shutdown has demoted dirty chunks."""


def _or_else(
    fallback: T,
) -> Callable[
    [Callable[Concatenate[CacheService, P], T]], Callable[Concatenate[CacheService, P], T]
]:
    """Return a decorator that makes a method return ``fallback`` after an unexpected error.

    Only :meth:`CacheService.end_step` and :meth:`CacheService.lookup` have their own try blocks
    instead, to save a function call. They run in most steps, when CPU caches are cold.
    """

    def decorate(
        method: Callable[Concatenate[CacheService, P], T],
    ) -> Callable[Concatenate[CacheService, P], T]:
        @functools.wraps(method)
        def guarded(self: CacheService, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the top of a call from the engine
                self.report_error(method.__name__, error)
                return fallback

        return guarded

    return decorate


_NO_TIER: Final[int | None] = None
_NO_PLAN: Final[LoadPlan | None] = None
_NO_EVENTS: Final[Sequence[ResidencyEvent]] = ()
_NO_STORE: Final[StorePlan | None] = NOTHING_TO_STORE


class CacheService:
    """The cache that a scheduler calls, always from one thread. Not thread-safe.

    Every method returns at once, except :meth:`reset_cache` (10 s at most) and
    :meth:`shutdown`.

    Args:
        storage: The engine's tiers; closed with the service.
        tokens_per_chunk: Number of tokens of a chunk of the counting group, for hit counts.
        retain_s: Seconds for which chunks stay in RAM after a use, unless a request sets a
            time.
        close_timeout_s: Largest number of seconds that :meth:`shutdown` may take.

    Attributes:
        is_idle: Whether :meth:`end_step` would have no work.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        tokens_per_chunk: int,
        retain_s: float = 0.0,
        close_timeout_s: float,
    ) -> None:
        self._storage = storage
        self._manager = storage.manager
        self._observer = storage.observer
        self._tokens_per_chunk = tokens_per_chunk
        self._close_timeout_s = close_timeout_s
        names = [tier.name for tier in storage.manager.snapshot().tiers]
        natures = [TierNature(names[0], "CPU", "LOCAL")]
        natures += [
            TierNature(tier.name, "STORAGE", "LOCAL" if tier.is_local else "REMOTE")
            for tier in storage.tiers
        ]
        self._hints = HintReader(natures)
        self._retain_s = retain_s
        self._jobs = TierJobs(storage, self.report_error)
        self._results = storage.engine.posted
        self._waits = LoadWaits()
        self._notices = Notices(names, storage.region.geometry.slot_nbytes)
        self._notices_due_s = float("-inf")
        self._clock = StepClock()
        self.is_idle = False
        self._internal_errors = 0
        self._logged_errors: set[tuple[str, type[Exception]]] = set()
        self._step_begins = True
        self._steps_with_events = 0
        self._is_disabled = False
        self._is_closed = False

    # -- requests ------------------------------------------------------------------------------

    @_or_else(None)
    def begin_request(self, request: RequestContext) -> None:
        """Register a request and its hints, after the end of any request with the same id."""
        self._waits.forget(request.req_id)
        hints = self._hints.read(request.kv_transfer_params)
        self._manager.begin_request(request.req_id, hints.terms)
        if self._observer is not None:
            self._observer.arrived(request, time.monotonic(), hints.terms.session)

    @_or_else(None)
    def end_request(self, request: RequestContext) -> None:
        """Forget a request. Its loads and stores in flight continue."""
        self.is_idle = False
        self._waits.forget(request.req_id)
        self._manager.end_request(request.req_id)
        if self._observer is not None:
            self._observer.ended(request)

    # -- lookup and load -----------------------------------------------------------------------

    def lookup(self, req_id: str, prompt: Prompt) -> int | None:
        """Return how many tokens can be loaded now; None to look up again in the next step."""
        try:
            manager = self._manager
            has_results = bool(self._results)
            if not has_results and manager.is_asking(req_id) and not self._is_disabled:
                return None  # nothing has changed since the last lookup
            was_idle = self.is_idle and not has_results
            self._begin_step()
            tokens = 0 if self._is_disabled else manager.lookup(req_id, prompt)
            if tokens is None:
                self._waits.begin(req_id)
                if manager.is_asking(req_id):
                    self._jobs.submit()  # now, because the request waits for the answer
                    if manager.is_asking(req_id):
                        # If no other request was looked up, the step has no other work.
                        self._step_begins = self.is_idle = was_idle
        except Exception as error:  # noqa: BLE001 - the top of a call from the engine
            self.report_error("lookup", error)
            self._fail_request(req_id)  # else it might wait for a question that nobody got
            return 0
        return tokens

    @_or_else(_NO_TIER)
    def residence(self, key: ChunkKey, req_id: str) -> int | None:
        """Return the index of the fastest tier that can serve ``key``; None for a miss."""
        self._begin_step()
        return None if self._is_disabled else self._manager.residence(key, req_id)

    def is_deferred(self, req_id: str) -> bool:
        """Return whether a request waits for chunks. If so, a lookup has no result yet."""
        return self._manager.is_deferred(req_id)

    @_or_else(None)
    def fetch(self, keys: Sequence[ChunkKey], req_id: str) -> None:
        """Make a request wait until ``keys``, the chunks of its whole hit, are in RAM."""
        self.is_idle = False
        self._manager.fetch(keys, req_id)

    def prepare_load(self, keys: Sequence[ChunkKey], req_id: str) -> LoadPlan:
        """Pin ``keys``, which were hits in this step, and return the load plan.

        The engine cannot handle a refusal here. So after an error this method returns a plan
        whose load fails.
        """
        self.is_idle = False
        plan = self._plan_load(keys, req_id)
        if plan is None:
            self._fail_request(req_id)
            chunks = len(keys)
            return LoadPlan([NO_SLOT] * chunks, [NO_GENERATION] * chunks, [0] * chunks)
        self._waits.begin(req_id)
        if plan.wait_s:
            self._submit_now()
        return plan

    @_or_else(None)
    def complete_load(
        self,
        keys: Collection[ChunkKey],
        request: RequestContext,
        load_id: int | None = None,
        *,
        failed_reads: Mapping[int, Outcome] = MappingProxyType({}),
    ) -> None:
        """End a load of ``keys``; drop chunks that failed to load.

        Args:
            keys: The chunks of the load.
            request: The request of the load, which may have ended.
            load_id: ``load_id`` of the load's plan; None for the request's oldest load.
            failed_reads: Outcome of each failed GDS read, by the chunk's position in ``keys``.
        """
        self.is_idle = False
        self._waits.end(request.req_id)
        try:  # before the manager unpins the chunks: it may hold them in RAM for this load only
            self._retain(keys, request)
        finally:
            self._manager.complete_load(request.req_id, load_id, failed_reads=failed_reads)

    # -- store ---------------------------------------------------------------------------------

    @_or_else(_NO_STORE)
    def prepare_store(
        self, keys: Sequence[ChunkKey], req_id: str, *, is_last: bool = False
    ) -> StorePlan | None:
        """Return the plan of a store; None if RAM has too few slots for the new chunks now.

        After a *last* offer the result is never None: the chunks that do not fit are refused.
        """
        self.is_idle = False
        self._jobs.take_results()
        if self._is_disabled:
            return NOTHING_TO_STORE
        return self._manager.prepare_store(keys, req_id, is_last=is_last)

    @_or_else(None)
    def complete_store(self, keys: Collection[ChunkKey], request: RequestContext) -> None:
        """End a store; the ``keys`` that every worker stored completely become hits.

        The request may have ended.
        """
        self.is_idle = False
        self._manager.complete_store(keys)
        self._retain(keys, request)

    # -- steps ---------------------------------------------------------------------------------

    def end_step(self, *, started: Iterable[str], preempted: Iterable[str]) -> None:
        """Close a scheduling step, and start promotions and demotions.

        Args:
            started: Requests that were scheduled for the first time in this step.
            preempted: Requests that lost their blocks and will be looked up again.
        """
        # Most steps have little to do: each call below is made only if it has something to do.
        try:
            self._step_begins = True
            self._steps_with_events += 1
            if self._results:
                self._jobs.take_results()
            now = time.monotonic()
            manager = self._manager
            manager.end_step(started=started, preempted=preempted, now=now)
            if self._waits:
                for req_id in started:
                    self._waits.end(req_id)
            if manager.has_output:
                self._jobs.submit()
            if now >= self._notices_due_s:
                self._log_notices(now)
            if self._observer is not None:
                self._observer.started(started, now)
            # Steps with waiting events are counted, so that they cannot keep an engine busy.
            self.is_idle = manager.can_skip_step and not manager.has_events
        except Exception as error:  # noqa: BLE001 - the top of a call from the engine
            self.is_idle = False
            self.report_error("end_step", error)

    def step_scheduled(self, tokens: int) -> None:
        """Record that a step with ``tokens`` prompt tokens was scheduled.

        The cost model can compare loading with computing only if the engine calls this for each
        step, and :meth:`step_ended` when the output of the step arrives.
        """
        self._clock.scheduled(tokens)

    def step_ended(self) -> None:
        """Record that the oldest scheduled step ended."""
        step = self._clock.ended()
        if step is not None:
            self._learn(*step)

    @_or_else(False)  # noqa: FBT003 - the value that is returned
    def has_pending_work(self) -> bool:
        """Return whether the engine must keep stepping while no request runs."""
        # Events are work for a few steps only: an engine without a listener never takes them.
        if self._is_closed:
            return False
        has_listener = self._steps_with_events < _MAX_STEPS_WITH_EVENTS
        return self._manager.has_work() or (has_listener and self._manager.has_events)

    @_or_else(_NO_EVENTS)
    def take_events(self) -> Sequence[ResidencyEvent]:
        """Return the events of chunks that entered or left a tier, oldest first.

        The removal of a chunk comes before the arrival of the next chunk in its slot.
        The engine calls this method after each step.
        """
        events = self._manager.take_events()
        self._steps_with_events = 0  # last, so that repeated errors do not keep the engine busy
        return events

    # -- figures -------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether the engine will run another step, because a request runs or work is pending.

        Waiting events do not count, because the engine takes them in this step, after the
        figures.
        """
        manager = self._manager
        if manager.requests or manager.has_worker_jobs:
            return True
        return not self._is_closed and manager.has_work()

    def record_copies(self, copies: Transfers) -> None:
        """Add the workers' finished copies to the result of :meth:`take_transfers`."""
        self._jobs.transfers.add(copies)

    def take_load_waits(self) -> list[float]:
        """Return the duration in seconds of each load wait that ended since the last call."""
        return self._waits.take()

    def take_reuse_gaps(self) -> list[list[float]]:
        """Return the seconds between each chunk's eviction and next lookup, per tier."""
        return self._manager.take_reuse_gaps()

    def take_transfers(self) -> Transfers:
        """Return the workers' copies and the transfers between tiers since the last call."""
        return self._jobs.transfers.take()

    def statistics(self) -> EngineStatistics:
        """Return all current figures of this engine."""
        # The engine calls this once a second. So this call makes the next step end the
        # retention of chunks whose time is over, and no other step looks for such chunks.
        self.is_idle = False
        storage = self._storage
        return collect_statistics(
            self._manager.snapshot(),
            storage.engine.statistics(),
            tokens_per_chunk=self._tokens_per_chunk,
            pageable_ranks=storage.region.control.pageable_ranks(),
            gds_ranks=storage.region.control.gds_ranks(),
            internal_errors=self._internal_errors,
            shadows=() if self._observer is None else self._observer.figures(),
            recorder=None if storage.recorder is None else storage.recorder.statistics(),
            recovered=storage.recovered,
            stores=storage.stores,
        )

    def report_error(self, where: str, error: Exception) -> None:
        """Count an unexpected error in the call ``where``; log the first of each kind."""
        self._internal_errors += 1
        kind = where, type(error)
        if kind not in self._logged_errors:
            self._logged_errors.add(kind)
            logger.error(
                "%s: unexpected error, answered as a miss; each later %s is only counted",
                where,
                type(error).__name__,
                exc_info=error,
            )

    # -- reset and shutdown --------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Make every chunk in every tier a miss, durably, because weights may have changed.

        Returns:
            Whether the reset is durable. If not, this engine serves no old chunks, but a
            restart may recover them: reset the cache again.
        """
        self._reset_manager()
        return self._jobs.reset_tiers()

    @_or_else(None)
    def _reset_manager(self) -> None:
        """Make every chunk a miss in the manager; if the manager raises, disable the cache."""
        self.is_idle = False
        try:
            self._manager.reset()
        except Exception as error:  # noqa: BLE001 - from now on every lookup is a miss
            self._is_disabled = self._step_begins = True
            self.report_error("reset_cache", error)
            logger.critical(
                "the cache could not be reset: nothing is loaded or stored any more"
            )
        if self._observer is not None:
            self._observer.reset()
        self._jobs.take_results()
        self._jobs.forget_corrupt()

    def shutdown(self) -> None:
        """Demote dirty chunks, close the tiers and free the memory. Idempotent.

        A shutdown takes at most ``close_timeout_s``. The last seconds are reserved for closing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        deadline = Deadline(self._close_timeout_s)
        with ExitStack() as stack:  # an error in one part must not keep a store locked
            stack.callback(lambda: self._storage.close(timeout_s=deadline.left_s()))
            if self._observer is not None:
                stack.callback(self._observer.close)
            try:
                self._log_notices(time.monotonic())
                self._jobs.drain(timeout_s=deadline.share_s(_CLOSING_S))
            except Exception:
                logger.exception("shutdown: dirty chunks may not have reached the slower tiers")

    # -- internals -----------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Process the results of ended jobs, once per step and before the first lookup.

        A result may drop a copy of a chunk. Results must not be processed after a lookup,
        because the reported hit may need that copy.
        """
        if self._step_begins:
            self._step_begins = self.is_idle = False
            if self._results:
                self._jobs.take_results()
            self._jobs.update_service()

    @_or_else(None)
    def _learn(self, tokens: int, seconds: float) -> None:
        """Report the duration of a step with ``tokens`` prompt tokens to the cost model."""
        self._manager.record_prefill(tokens, seconds)

    @_or_else(_NO_PLAN)
    def _plan_load(self, keys: Sequence[ChunkKey], req_id: str) -> LoadPlan | None:
        return self._manager.prepare_load(keys, req_id)

    @_or_else(None)
    def _submit_now(self) -> None:
        """Submit a load's jobs now, because workers will wait for them."""
        self._jobs.submit()

    @_or_else(None)
    def _fail_request(self, req_id: str) -> None:
        """Make every later lookup of the request a miss."""
        self._manager.fail_request(req_id)

    def _log_notices(self, now: float) -> None:
        self._notices_due_s = now + _NOTICES_EVERY_S
        self._notices.log_dropped(self._manager.dropped, now)
        self._notices.log_skipped(self._manager.cost_model, now)
        self._notices.log_policies(self._manager.policy_errors)

    def _retain(self, keys: Collection[ChunkKey], request: RequestContext) -> None:
        """Retain ``keys`` in RAM for the time that the request or the configuration sets."""
        retain_s = self._hints.read(request.kv_transfer_params).retain_s
        if retain_s is None:
            retain_s = self._retain_s
        if retain_s:
            self._manager.retain(keys, time.monotonic() + retain_s)
