"""A cache as a scheduler uses it: the pure manager and the storage engine behind one object.

It lives in the scheduler's thread, where an exception kills the engine and a wait stalls
every request. So it only moves values: results of the storage engine to the pure manager, at
the edges of a step, and new jobs back; and an unexpected error is logged once, counted, and
answered as a miss.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from kvtier.connector.context import RequestContext
from kvtier.connector.hints import NO_HINTS, HintReader, RequestHints, TierNature
from kvtier.connector.pace import StepClock
from kvtier.connector.report.pressure import PressureLog
from kvtier.connector.report.statistics import EngineStatistics, engine_statistics
from kvtier.connector.report.waits import LoadWaits
from kvtier.connector.report.worth_log import WorthLog
from kvtier.connector.stats import ConnectorStats
from kvtier.connector.storage import Storage
from kvtier.keys import ChunkKey
from kvtier.logs import get_logger
from kvtier.manager import LoadPlan, ResidencyEvent, StorePlan
from kvtier.manager.hits import Prompt
from kvtier.manager.plans import NO_GENERATION, NO_SLOT
from kvtier.types import Job, JobId, Outcome, TransferResult

__all__ = ["CacheService", "answered_with"]

logger = get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Service = TypeVar("Service", bound="CacheService")

_RESET_TIMEOUT_S = 10.0
_LOGS_EVERY_S = 1.0
_MOST_STEPS_AHEAD = 8


def answered_with(
    fallback: Callable[[], T],
) -> Callable[[Callable[Concatenate[Service, P], T]], Callable[Concatenate[Service, P], T]]:
    """Answer an unexpected error with ``fallback()`` instead of letting it kill the engine."""

    def decorate(
        method: Callable[Concatenate[Service, P], T],
    ) -> Callable[Concatenate[Service, P], T]:
        @functools.wraps(method)
        def guarded(self: Service, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the top of a call from the engine
                self.note_internal_error(method.__name__, error)
                return fallback()

        return guarded

    return decorate


def _nothing() -> None:
    return None


def _no_hit() -> int | None:
    return 0


def _nowhere() -> int | None:
    return None


def _no_chunks() -> StorePlan | None:
    return StorePlan([], [], 0, [])


def _no_events() -> list[ResidencyEvent]:
    return []


def _not_durable() -> bool:
    return False


def _natures(ram: str, storage: Storage) -> list[TierNature]:
    """Return what requests may call the tiers, of which the first is called ``ram``."""
    return [
        TierNature(ram, "CPU", "LOCAL"),
        *(
            TierNature(tier.name, "STORAGE", "LOCAL" if tier.is_local else "REMOTE")
            for tier in storage.tiers
        ),
    ]


class CacheService:
    """Answers a scheduler. Not thread-safe; one thread calls it.

    Every method returns at once, but for :meth:`reset_cache` (10 s at most) and
    :meth:`shutdown`.

    Args:
        storage: The engine's tiers; closed with the service.
        tokens_per_chunk: Tokens of a chunk of the counting group, for hit counts.
        retain_s: Seconds chunks are kept in RAM after a use whose request does not say.
        close_timeout_s: Longest that each part of :meth:`shutdown` may take.

    Attributes:
        computing: Notes that a step was scheduled which computes so many prompt tokens. An
            engine that says so for each of its steps, and :meth:`computed` when their output is
            there, lets loads be compared with computing.
        rests: Whether :meth:`end_step` would find nothing to do.
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
        self._engine = storage.engine
        self._observer = storage.observer
        self._tokens_per_chunk = tokens_per_chunk
        self._retain_s = retain_s
        self._close_timeout_s = close_timeout_s
        names = [tier.name for tier in storage.manager.snapshot().tiers]
        self._reader = HintReader(_natures(names[0], storage))
        self._hints: dict[str, RequestHints] = {}
        # A request's last stores and loads may end after it: its hints outlive it until then.
        self._ended: set[str] = set()
        self._jobs: Counter[str] = Counter()
        self._loading: dict[str, deque[Sequence[ChunkKey]]] = {}
        self._internal_errors = 0
        self._transfers = ConnectorStats()
        self._waits = LoadWaits()
        self._ways: dict[JobId, tuple[str, str]] = {}
        self._pressure = PressureLog(names, storage.region.geometry.slot_nbytes)
        self._worth = WorthLog(names)
        self._logs_due_s = float("-inf")
        self._clock = StepClock()
        self.computing = self._clock.scheduled
        self.rests = False
        self._numbers = {tier.name: at for at, tier in enumerate(storage.tiers, start=1)}
        self._out_of_service: frozenset[int] = frozenset()
        self._step_begins = True
        self._disabled = False
        self._steps_untaken = 0
        self._closed = False

    # -- requests ------------------------------------------------------------------------------

    @answered_with(_nothing)
    def begin_request(self, request: RequestContext) -> None:
        """Start remembering a request, and no other one that had its id."""
        self.rests = False
        self._hints.pop(request.req_id, None)
        self._ended.discard(request.req_id)
        self._jobs.pop(request.req_id, None)
        self._waits.forget(request.req_id)
        hints = self._reader.read(request.kv_transfer_params)
        if hints != NO_HINTS:
            self._hints[request.req_id] = hints
        self._manager.begin_request(request.req_id, hints.terms)
        if self._observer is not None:
            self._observer.arrived(request, time.monotonic(), hints.terms.session)

    @answered_with(_nothing)
    def end_request(self, request: RequestContext) -> None:
        """Forget a request; its loads and stores in flight go on."""
        self.rests = False
        self._waits.forget(request.req_id)
        if request.req_id in self._hints:
            self._ended.add(request.req_id)
            self._drop_hints(request.req_id)
        self._manager.end_request(request.req_id)
        if self._observer is not None:
            self._observer.ended(request)

    # -- lookup and load -----------------------------------------------------------------------

    @answered_with(_no_hit)
    def lookup(self, req_id: str, prompt: Prompt) -> int | None:
        """Return how many tokens can be loaded now; None to be asked at the next step."""
        self._begin_step()
        tokens = 0 if self._disabled else self._manager.lookup(req_id, prompt)
        if tokens is None:
            self._waits.begin(req_id)
        return tokens

    @answered_with(_nowhere)
    def residence(self, key: ChunkKey, req_id: str) -> int | None:
        """Return the index of the fastest tier that can serve ``key``; None for a miss."""
        self._begin_step()
        return None if self._disabled else self._manager.residence(key, req_id)

    def is_deferred(self, req_id: str) -> bool:
        """Return whether a request waits for chunks, so that asking for it is no use."""
        return self._manager.is_deferred(req_id)

    @answered_with(_nothing)
    def fetch(self, keys: Sequence[ChunkKey], req_id: str) -> None:
        """Queue a request for ``keys``, all it found; it is deferred until they are in RAM."""
        self.rests = False
        self._manager.fetch(keys, req_id)

    def prepare_load(self, keys: Sequence[ChunkKey], req_id: str) -> LoadPlan:
        """Pin chunks that were hits in this step and say where they are, or will be.

        What cannot be loaded is planned all the same, as a load that fails: the engine has no
        ear for anything else by now.
        """
        self.rests = False
        try:
            plan = self._manager.prepare_load(keys, req_id)
        except Exception as error:  # noqa: BLE001 - the top of a call from the engine
            self.note_internal_error("prepare_load", error)
            return self._no_load(len(keys), req_id)
        self._waits.begin(req_id)
        if plan.wait_s:
            self._start_now()
        if self._retain_seconds(req_id):
            self._loading.setdefault(req_id, deque()).append(keys)
            self._jobs[req_id] += 1
        return plan

    @answered_with(_nothing)
    def complete_load(self, req_id: str) -> None:
        """End a request's load: chunks a worker could not load are dropped."""
        self.rests = False
        self._waits.end(req_id)
        loads = self._loading.get(req_id)
        if loads:
            # Before the load lets go of them: some may have come up for it alone.
            self._retain(loads.popleft(), req_id)
            if not loads:
                del self._loading[req_id]
        self._manager.complete_load(req_id)
        self._end_job(req_id)

    # -- store ---------------------------------------------------------------------------------

    @answered_with(_no_chunks)
    def prepare_store(self, keys: Sequence[ChunkKey], req_id: str) -> StorePlan | None:
        """Give new chunks RAM slots; None when there is no room now."""
        self.rests = False
        self._take_results()
        hints = self._hints.get(req_id)
        if self._disabled or (hints is not None and hints.stores_nothing):
            return _no_chunks()
        plan = self._manager.prepare_store(keys, req_id)
        if hints is not None and plan is not None and plan.keys:
            self._jobs[req_id] += 1
        return plan

    @answered_with(_nothing)
    def complete_store(self, keys: Collection[ChunkKey], req_id: str) -> None:
        """Make stored chunks hits if every worker recorded that they are whole."""
        self.rests = False
        self._manager.complete_store(keys)
        self._retain(keys, req_id)
        self._end_job(req_id)

    # -- steps ---------------------------------------------------------------------------------

    def end_step(self, *, started: Iterable[str], preempted: Iterable[str]) -> None:
        """Close a scheduling step: start promotions and demotions.

        Args:
            started: Requests that were scheduled for the first time in this step.
            preempted: Requests that lost their blocks and will be looked up again.
        """
        # Most steps bring nothing to do, and whatever is asked then is asked with cold caches,
        # after a forward pass; so without the decorator, and without calls that ask in vain.
        try:
            self._step_begins = True
            self._steps_untaken += 1
            self._take_results()
            now = time.monotonic()
            self._manager.end_step(started=started, preempted=preempted, now=now)
            if self._waits.any_waits:
                for req_id in started:
                    self._waits.end(req_id)
            if self._manager.has_output:
                self._hand_over()
            if now >= self._logs_due_s:
                self._note_logs(now)
            if self._observer is not None:
                self._observer.started(started, now)
            # Steps are counted while events wait, so that nobody steps for ever for their sake.
            self.rests = self._manager.is_idle and not self._manager.has_events
        except Exception as error:  # noqa: BLE001 - the top of a call from the engine
            self.rests = False
            self.note_internal_error("end_step", error)

    def computed(self) -> None:
        """Note that the oldest step that was scheduled is over."""
        step = self._clock.ended()
        if step is not None:
            self._learn(*step)

    @answered_with(lambda: False)
    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping while no request runs."""
        # Events that nobody takes are no work, or an engine without a listener never rests.
        listening = not self._closed and self._steps_untaken < _MOST_STEPS_AHEAD
        return self._is_working or (listening and self._manager.has_events)

    @answered_with(_no_events)
    def take_events(self) -> list[ResidencyEvent]:
        """Return residency changes, removals before the stores that use their room.

        To be called after each step: until all are taken, there is work.
        """
        events = self._manager.take_events()
        self._steps_untaken = 0  # after that, or an error at each step would never let it rest
        return events

    def take_load_waits(self) -> list[float]:
        """Return the seconds that requests waited for a load, since the last call."""
        return self._waits.take()

    def take_reuse_gaps(self) -> list[list[float]]:
        """Return, per tier, seconds from an eviction to being asked for the chunk again."""
        return self._manager.take_reuse_gaps()

    def take_transfers(self) -> ConnectorStats:
        """Return the transfers between tiers that ended since the last call."""
        return self._transfers.clone_and_reset()

    @property
    def is_active(self) -> bool:
        """Whether there is surely another step: a request runs, or work is pending.

        Events that wait are no reason: they are taken in this step, after its figures.
        """
        return bool(self._manager.requests) or self._is_working

    def statistics(self) -> EngineStatistics:
        """Return all figures of this engine now."""
        recorder = self._storage.recorder
        return engine_statistics(
            self._manager.snapshot(),
            self._engine.statistics(),
            tokens_per_chunk=self._tokens_per_chunk,
            internal_errors=self._internal_errors,
            shadows=() if self._observer is None else self._observer.figures(),
            recorder=None if recorder is None else recorder.statistics(),
            recovered=self._storage.recovered,
            stores=self._storage.stores,
        )

    # -- reset and shutdown --------------------------------------------------------------------

    @answered_with(_not_durable)
    def reset_cache(self) -> bool:
        """Make everything in every tier a miss, for good: weights may have changed.

        Returns:
            Whether it is for good. If not, nothing old is served here, but a restart may bring
            back what a tier held, unless a later call says that it is.
        """
        self._reset_books()
        return self._reset_tiers()

    @answered_with(_nothing)
    def _reset_books(self) -> None:
        """Make everything a miss here. Whatever fails in it, the tiers are reset as well."""
        self.rests = False
        self._loading.clear()
        self._jobs.clear()
        for req_id in list(self._ended):
            self._drop_hints(req_id)
        try:
            self._manager.reset()
        except Exception as error:  # noqa: BLE001 - nothing may be believed from now on
            self._disabled = self._step_begins = True
            self.note_internal_error("reset_cache", error)
            logger.critical(
                "the cache could not be reset: nothing is loaded or stored any more"
            )
        if self._observer is not None:
            self._observer.reset()
        self._take_results()
        self._forget_corrupt()

    def _reset_tiers(self) -> bool:
        """Empty the slower tiers for good; returns whether that is done."""
        try:
            resets = {tier.name: tier.reset for tier in self._storage.tiers}
            done = self._engine.exclusively_each(resets, timeout_s=_RESET_TIMEOUT_S)
        except Exception:
            logger.exception("resetting the tiers")
            done = False
        if not done:
            logger.error(
                "not every tier was reset for good: nothing old is served by this engine, but "
                "reset it again, or remove the stores' directories before another one uses them"
            )
        return done

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

    def _begin_step(self) -> None:
        """Take what the tiers finished, once per step and before its first lookup.

        A result may drop a copy that was a victim. A chunk that was reported as a hit must
        still be there when its load is prepared.
        """
        if self._step_begins:
            self._step_begins = self.rests = False
            self._take_results()
            self._note_service()

    @property
    def _is_working(self) -> bool:
        """Whether jobs between tiers are planned or on their way."""
        return not self._closed and self._manager.has_work()

    @answered_with(_nothing)
    def _learn(self, tokens: int, seconds: float) -> None:
        """Tell the manager how long a step took that computed ``tokens`` prompt tokens."""
        self._manager.record_prefill(tokens, seconds)

    @answered_with(_nothing)
    def _start_now(self) -> None:
        """Hand over the jobs of a load whose workers are about to wait for them."""
        self._hand_over()

    def _note_logs(self, now: float) -> None:
        """Tell the operator what the manager could not do, if anything is new."""
        self._logs_due_s = now + _LOGS_EVERY_S
        self._pressure.note(self._manager.dropped, now)
        self._worth.note(self._manager.cost_model, now)

    def _no_load(self, chunks: int, req_id: str) -> LoadPlan:
        """Return a load that fails, and see that its request asks for no other."""
        self._give_up(req_id)
        return LoadPlan([NO_SLOT] * chunks, [NO_GENERATION] * chunks, [0] * chunks)

    @answered_with(_nothing)
    def _give_up(self, req_id: str) -> None:
        """Answer MISS from now on; a policy that failed may fail again in letting go."""
        self._manager.fail_request(req_id)

    def _note_service(self) -> None:
        """Tell the manager which tiers are not to be read from for now."""
        sick = frozenset(
            self._numbers[source]
            for source, destination in self._engine.out_of_service()
            if source in self._numbers and destination not in self._numbers
        )
        if sick != self._out_of_service:
            self._out_of_service = sick
            self._manager.set_out_of_service(sick)

    def _retain(self, keys: Collection[ChunkKey], req_id: str) -> None:
        """Keep chunks that were just used in RAM as long as their request, or YAML, says."""
        retain_s = self._retain_seconds(req_id)
        if retain_s:
            self._manager.retain(keys, time.monotonic() + retain_s)

    def _retain_seconds(self, req_id: str) -> float:
        hints = self._hints.get(req_id)
        asked = None if hints is None else hints.retain_s
        return self._retain_s if asked is None else asked

    def _end_job(self, req_id: str) -> None:
        """Note that a load or a store ended, if any is counted for the request."""
        if req_id in self._jobs:
            self._jobs[req_id] -= 1
            if not self._jobs[req_id]:
                del self._jobs[req_id]
                self._drop_hints(req_id)

    def _drop_hints(self, req_id: str) -> None:
        """Forget the hints of a request that is over, unless a job of its own still runs."""
        if req_id in self._ended and req_id not in self._jobs:
            self._ended.discard(req_id)
            self._hints.pop(req_id, None)

    def _take_results(self) -> None:
        for result in self._engine.poll():
            self._note_transfer(result)
            self._apply(result)

    def _forget_corrupt(self) -> None:
        """Have the tiers forget what a restart must not bring back."""
        for tier, slot in self._manager.take_corrupt():
            self._storage.tiers[tier - 1].forget((slot,))

    def _apply(self, result: TransferResult) -> None:
        try:
            self._manager.apply(result)
        except Exception as error:  # noqa: BLE001 - the other results must not be lost
            self.note_internal_error("apply", error)

    def _note_transfer(self, result: TransferResult) -> None:
        if not result.settled:
            return
        way = self._ways.pop(result.job_id, None)
        if way is not None and result.nbytes:
            self._transfers.record_transfer(result.nbytes, result.seconds, way)

    def _hand_over(self) -> list[int]:
        """Give the storage engine the jobs and cancellations planned since the last call."""
        self._forget_corrupt()  # first: the jobs may use those slots again
        jobs = self._manager.take_jobs()
        try:
            if jobs:
                self._engine.submit(*jobs)
        except Exception as error:  # noqa: BLE001 - requests wait for an answer to each job
            self.note_internal_error("submit", error)
            self._abandon(jobs)
            return []
        for job in jobs:
            self._ways[job.job_id] = job.source, job.destination
        for job_id in self._manager.take_cancels():
            self._engine.cancel(job_id)
        return [job.job_id for job in jobs]

    def _abandon(self, jobs: Sequence[Job]) -> None:
        """Have jobs that could not be submitted fail, here and for workers that wait."""
        for job in jobs:
            try:
                # First, as for any other job: once the manager knows, the slot is another's.
                self._engine.abandon(job)
            except Exception as error:  # noqa: BLE001 - the others are waited for as well
                self.note_internal_error("abandon", error)
            self._apply(TransferResult(job.job_id, [Outcome.FAILED] * len(job.keys)))

    def _bring_down(self, deadline: float) -> None:
        """Run demotions until nothing is dirty, or until ``deadline``."""
        try:
            self._note_logs(time.monotonic())
            while (left_s := deadline - time.monotonic()) > 0:
                self._manager.flush()
                if not self._hand_over() and self._engine.idle:
                    return
                self._engine.wait_any(timeout_s=left_s)
                self._take_results()
            self._forget_corrupt()
        except Exception:
            logger.exception("shutdown: dirty chunks may not have reached the slower tiers")
