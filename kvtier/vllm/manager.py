"""The scheduler half: vLLM's OffloadingManager in front of kvtier's.

It lives in the scheduler's thread, where an exception kills the engine and a wait stalls
every request. So it only moves values: results of the storage engine to the pure manager, at
the edges of a step, and new jobs back; and an unexpected error is logged once, counted, and
answered as a miss.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import compress
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.keys import is_of_first_group
from kvtier.manager import Lookup
from kvtier.vllm.hints import HintReader, RequestHints
from kvtier.vllm.layout import block_hashes_are_stable
from kvtier.vllm.metrics import StatsReporter
from kvtier.vllm.observer import Observer
from kvtier.vllm.pressure import PressureLog
from kvtier.vllm.specs import SlotLoadStoreSpec
from kvtier.vllm.statistics import EngineStatistics, engine_statistics
from kvtier.vllm.storage import Storage

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )

__all__ = ["KVTierManager"]

logger = logging.getLogger(f"vllm.{__name__}")  # below the one logger vLLM configures

P = ParamSpec("P")
T = TypeVar("T")

_HIT, _MISS, _RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
_KVTIER_HIT, _KVTIER_MISS = Lookup.HIT, Lookup.MISS
_RESET_TIMEOUT_S = 10.0


def _answered_with(
    fallback: Callable[[], T],
) -> Callable[
    [Callable[Concatenate[KVTierManager, P], T]], Callable[Concatenate[KVTierManager, P], T]
]:
    """Answer an unexpected error with ``fallback()`` instead of letting it kill the engine."""

    def decorate(
        method: Callable[Concatenate[KVTierManager, P], T],
    ) -> Callable[Concatenate[KVTierManager, P], T]:
        @functools.wraps(method)
        def guarded(self: KVTierManager, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the top of a call from the engine
                self.note_internal_error(method.__name__, error)
                return fallback()

        return guarded

    return decorate


def _nothing() -> None:
    return None


class KVTierManager(OffloadingManager):
    """Answers vLLM's scheduler.

    Args:
        storage: The engine's tiers; closed with the manager.
        tokens_per_chunk: Tokens of a chunk of the first KV cache group, for hit counts.
        retain_s: Seconds chunks are kept in RAM after a use whose request does not say.
        report_metrics: Whether :meth:`get_stats` returns anything.
        close_timeout_s: Longest :meth:`shutdown`.
        observer: Follows whole requests, if anything wants to know.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        tokens_per_chunk: int,
        retain_s: float = 0.0,
        report_metrics: bool,
        close_timeout_s: float,
        observer: Observer | None = None,
    ) -> None:
        self._storage = storage
        self._manager = storage.manager
        self._engine = storage.engine
        self._tokens_per_chunk = tokens_per_chunk
        self._retain_s = retain_s
        self._hints = HintReader()
        self._report_metrics = report_metrics
        self._close_timeout_s = close_timeout_s
        self._observer = observer
        self._hit_tokens = [0] * (len(storage.tiers) + 1)
        self._internal_errors = 0
        self._reporter = StatsReporter()
        self._pressure = PressureLog(
            [tier.name for tier in storage.manager.snapshot().tiers],
            storage.region.geometry.slot_nbytes,
        )
        self._saw_request = False
        self._step_begins = True
        self._closed = False

    # -- requests ------------------------------------------------------------------------------

    @override
    @_answered_with(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Start remembering a request."""
        if not self._saw_request:
            self._saw_request = True
            if self._storage.tiers and not block_hashes_are_stable():
                logger.warning(
                    "vLLM seeds its block hashes at random, so nothing stored is found after a "
                    "restart: set PYTHONHASHSEED, or use --prefix-caching-hash-algo sha256"
                )
        req_context.set_state(self._hints.read(req_context.kv_transfer_params))
        self._manager.begin_request(req_context.req_id)
        if self._observer is not None:
            self._observer.arrived(req_context, time.monotonic())
        return RequestOffloadingContext(policy=OffloadPolicy.CHUNK_LEVEL)

    @override
    @_answered_with(_nothing)
    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget a request; its loads and stores in flight go on."""
        self._manager.end_request(req_context.req_id)
        if self._observer is not None:
            self._observer.ended(req_context)

    # -- lookup and load -----------------------------------------------------------------------

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say whether a chunk can be loaded now, later or not at all."""
        # Guarded here and not by the decorator, whose extra call would cost as much again: this
        # runs for every chunk of every waiting request.
        try:
            if self._step_begins:
                # Once per step, before the first answer: a result may drop a copy that was a
                # victim, and a chunk that was called a hit must still be there when its load
                # is prepared.
                self._step_begins = False
                self._take_results()
            answer = self._manager.lookup(key, req_context.req_id)
        except Exception as error:  # noqa: BLE001 - the top of a call from the engine
            self.note_internal_error("lookup", error)
            return _MISS
        if answer is _KVTIER_HIT:
            return _HIT
        return _MISS if answer is _KVTIER_MISS else _RETRY

    @override
    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> LoadStoreSpec:
        """Pin chunks that were hits in this step and say where they are.

        Raises:
            KeyError: One was not; there is no answer but a wrong token.
        """
        plan = self._manager.prepare_load(list(keys), req_context.req_id)
        self._retain(keys, req_context)
        first_group = compress(plan.origins, map(is_of_first_group, keys))
        for origin, chunks in Counter(first_group).items():
            self._hit_tokens[origin] += chunks * self._tokens_per_chunk
        return SlotLoadStoreSpec(plan.slots, plan.generations)

    @override
    @_answered_with(lambda: CacheHitSource.EXTERNAL_UNSPECIFIED)
    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Say where a hit's bytes came from."""
        source = self._manager.load_source(key)
        return CacheHitSource.DISK if source else CacheHitSource.HOST

    @override
    @_answered_with(_nothing)
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Take back a load's pins."""
        self._manager.complete_load(keys)

    # -- store ---------------------------------------------------------------------------------

    @override
    @_answered_with(lambda: PrepareStoreOutput([], SlotLoadStoreSpec((), ()), []))
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Give new chunks RAM slots; None when there is no room now."""
        self._take_results()
        hints = req_context.get_state(RequestHints)
        if hints is not None and hints.skip_store:
            return PrepareStoreOutput([], SlotLoadStoreSpec((), ()), [])
        plan = self._manager.prepare_store(list(keys), req_context.req_id)
        if plan is None:
            return None
        return PrepareStoreOutput(
            keys_to_store=cast("list[OffloadKey]", plan.keys),
            store_spec=SlotLoadStoreSpec(plan.slots, [plan.generation] * len(plan.slots)),
            evicted_keys=cast("list[OffloadKey]", plan.evicted),
        )

    @override
    @_answered_with(_nothing)
    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
    ) -> None:
        """Make stored chunks hits if every worker recorded that they are whole."""
        self._manager.complete_store(keys)
        self._retain(keys, req_context)

    # -- steps ---------------------------------------------------------------------------------

    @override
    @_answered_with(_nothing)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Close a scheduling step: start promotions and demotions."""
        self._step_begins = True
        self._take_results()
        now = time.monotonic()
        self._manager.end_step(
            started=context.new_req_ids,
            preempted=context.preempted_req_ids,
            now=now,
        )
        self._hand_over()
        self._pressure.note(self._manager.dropped, now)
        if self._observer is not None:
            self._observer.started(context.new_req_ids, now)

    @override
    @_answered_with(lambda: False)
    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping while no request runs."""
        return not self._closed and self._manager.has_work()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Yield residency changes, removals before the stores that use their room."""
        for event in self._manager.take_events():
            yield OffloadingEvent(
                keys=[OffloadKey(key) for key in event.keys],
                medium=Medium.STORAGE if event.tier else Medium.CPU,
                removed=event.removed,
            )

    @override
    @_answered_with(_nothing)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what changed since the last call."""
        if not self._report_metrics:
            return None
        return self._reporter.report(self.statistics(), self._manager.take_reuse_gaps())

    def statistics(self) -> EngineStatistics:
        """Return all figures of this engine now."""
        return engine_statistics(
            self._manager.snapshot(),
            self._engine.statistics(),
            hit_tokens=self._hit_tokens,
            internal_errors=self._internal_errors,
            shadows=() if self._observer is None else self._observer.figures(),
            recorder=None
            if self._storage.recorder is None
            else self._storage.recorder.statistics(),
        )

    # -- reset and shutdown --------------------------------------------------------------------

    @override
    @_answered_with(_nothing)
    def reset_cache(self) -> None:
        """Make everything in every tier a miss, for good: weights may have changed."""
        self._manager.reset()
        if self._observer is not None:
            self._observer.reset()
        self._take_results()
        try:
            done = self._engine.exclusively(self._reset_tiers, timeout_s=_RESET_TIMEOUT_S)
        except Exception:
            logger.exception("resetting the tiers")
            done = False
        if not done:
            logger.error(
                "not every tier was reset for good: nothing old is served by this engine, but "
                "remove the stores' directories before another one uses them"
            )

    @override
    def shutdown(self) -> None:
        """Bring dirty chunks down, close the tiers and free the memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._bring_down(time.monotonic() + self._close_timeout_s)
        if self._observer is not None:
            self._observer.close()
        self._storage.close(timeout_s=self._close_timeout_s)

    def note_internal_error(self, where: str, error: Exception) -> None:
        """Count an unexpected error, and log the first with its traceback."""
        self._internal_errors += 1
        if self._internal_errors == 1:
            logger.error(
                "%s: unexpected error, answered as a miss; later ones are only counted",
                where,
                exc_info=error,
            )

    # -- internals -----------------------------------------------------------------------------

    def _retain(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Keep chunks that were just used in RAM as long as their request, or YAML, says."""
        hints = req_context.get_state(RequestHints)
        asked = None if hints is None else hints.retain_s
        retain_s = self._retain_s if asked is None else asked
        if retain_s:
            self._manager.retain(keys, time.monotonic() + retain_s)

    def _take_results(self) -> None:
        for result in self._engine.poll():
            try:
                self._manager.apply(result)
            except Exception as error:  # noqa: BLE001 - the other results must not be lost
                self.note_internal_error("apply", error)
        for tier, slot in self._manager.take_corrupt():
            self._storage.tiers[tier - 1].forget((slot,))

    def _hand_over(self) -> list[int]:
        """Give the storage engine the jobs and cancellations planned since the last call."""
        jobs = self._manager.take_jobs()
        for job in jobs:
            self._engine.submit(job)
        for job_id in self._manager.take_cancels():
            self._engine.cancel(job_id)
        return [job.job_id for job in jobs]

    def _bring_down(self, deadline: float) -> None:
        """Run demotions until nothing is dirty, or until ``deadline``."""
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                self._manager.flush()
                if not self._hand_over() and self._engine.idle:
                    return
                self._engine.wait_any(timeout_s=left_s)
                self._take_results()
        except Exception:
            logger.exception("shutdown: dirty chunks may not have reached the slower tiers")

    async def _reset_tiers(self) -> None:
        """Reset every tier, also when one of them fails.

        Raises:
            ExceptionGroup: What went wrong, tier by tier.
        """
        errors: list[Exception] = []
        for tier in self._storage.tiers:
            try:
                await tier.reset()
            except Exception as error:  # noqa: BLE001 - raised below, after the other tiers
                errors.append(error)
        if errors:
            raise ExceptionGroup("tiers that could not be reset", errors)
