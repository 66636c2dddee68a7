"""The scheduler half of the first door: vLLM's OffloadingManager, in kvtier's words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, cast

from typing_extensions import override

from kvtier.connector.report.statistics import EngineStatistics
from kvtier.connector.service import CacheService
from kvtier.keys import ChunkKey
from kvtier.logs import get_logger
from kvtier.manager import Lookup, StorePlan
from kvtier.vllm.adapters import AdapterContent, content_of, tie_content, without_adapter
from kvtier.vllm.contract import (
    CHUNK_LEVEL,
    DISK_HIT,
    EVENT_EXTRAS,
    HIT_PENDING,
    HOST_HIT,
    NAMES_TIERS,
    RAM_MEDIUM,
    STORAGE_MEDIUM,
    LoadStoreSpec,
    LookupResult,
    OffloadingConnectorStats,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from kvtier.vllm.layout import block_hashes_are_stable
from kvtier.vllm.metrics import StatsReporter
from kvtier.vllm.specs import SlotLoadStoreSpec
from kvtier.vllm.worker import wait_for_stores_here

__all__ = ["KVTierManager"]

logger = get_logger(__name__)

_HIT, _MISS, _RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
_KVTIER_HIT, _KVTIER_MISS, _KVTIER_PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING


class _Table(Enum):
    """What vLLM's half knows of a request's blocks."""

    TOLD = auto()
    FORGOTTEN = auto()
    MUDDLED = auto()


class KVTierManager(OffloadingManager):
    """Answers vLLM's scheduler; nothing it calls raises.

    Chunks of a request with an adapter have keys of their own here, as
    :mod:`kvtier.vllm.adapters` says, and vLLM's wherever vLLM is told of them.

    Args:
        service: The cache; shut down with the manager.
        persistent: Whether a restart should find what was stored.
        report_metrics: Whether :meth:`get_stats` returns anything.

    Attributes:
        computing: Notes that the step that was just scheduled computes so many prompt tokens.
        computed: Notes that the oldest step that was scheduled is over.
        has_stats: Returns whether it is time for :meth:`get_stats`.
        owes_reset: Whether a restart may bring back what the last reset was to remove.
        believes_tables: Whether vLLM's half knows the blocks of a request whose prompt comes in
            parts. It does not by itself: :mod:`kvtier.vllm.corrections` says why. Where nobody
            corrects it, such a request stores nothing from the second part on.
    """

    def __init__(
        self, service: CacheService, *, persistent: bool, report_metrics: bool
    ) -> None:
        self._service = service
        self._lookup = service.lookup
        # Called in every step, with cold caches: each frame between costs microseconds.
        self.computing = service.computing
        self.computed = service.computed
        self._warn_of_random_hashes = persistent
        self._reporter = StatsReporter(service) if report_metrics else None
        self.has_stats = _always if self._reporter is None else self._reporter.is_due
        self.owes_reset = False
        self.believes_tables = False
        self._tables: dict[str, _Table] = {}
        self._in_step: set[str] = set()
        self._arriving: AdapterContent | None = None
        names = [tier.name for tier in service.statistics().tiers]
        self._tiers = [_place(name, index) for index, name in enumerate(names)]

    # -- requests ------------------------------------------------------------------------------

    @contextmanager
    def adapting(self, content: AdapterContent) -> Iterator[None]:
        """Take it that the requests which arrive meanwhile have an adapter of ``content``."""
        self._arriving = content
        try:
            yield
        finally:
            self._arriving = None

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Start remembering a request."""
        if self._warn_of_random_hashes:
            self._warn_of_random_hashes = False
            if not block_hashes_are_stable():
                logger.warning(
                    "vLLM seeds its block hashes at random, so nothing stored is found after a "
                    "restart: set PYTHONHASHSEED, or use --prefix-caching-hash-algo sha256"
                )
        if self._arriving is not None:
            tie_content(req_context, self._arriving)
        self._service.begin_request(req_context)
        return RequestOffloadingContext(policy=CHUNK_LEVEL)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget a request; its loads and stores in flight go on."""
        self._tables.pop(req_context.req_id, None)
        self._service.end_request(req_context)

    # -- lookup and load -----------------------------------------------------------------------

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say whether a chunk can be loaded now, later or not at all."""
        content = content_of(req_context)
        if content is not None:
            key = cast("OffloadKey", content.key(key))
        answer = self._lookup(key, req_context.req_id)
        if answer is _KVTIER_HIT:
            return _HIT
        if answer is _KVTIER_MISS:
            return _MISS
        return HIT_PENDING if answer is _KVTIER_PENDING else _RETRY

    @override
    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> LoadStoreSpec:
        """Pin chunks that were hits in this step and say where they are, or will be."""
        req_id = req_context.req_id
        plan = self._service.prepare_load(_own_keys(keys, req_context), req_id)
        in_step = req_id in self._in_step
        self._in_step.discard(req_id)
        return SlotLoadStoreSpec(plan.slots, plan.generations, plan.wait_s, in_step=in_step)

    def in_ram(self, keys: Collection[OffloadKey], req_context: ReqContext) -> bool:
        """Say whether hits of this step are all whole in RAM, and not on their way there."""
        return self._service.in_ram(_own_keys(keys, req_context))

    def load_in_step(self, req_id: str) -> None:
        """Note that the request's next load happens within the forward pass."""
        self._in_step.add(req_id)

    def get_load_source(
        self,
        key: OffloadKey,
        req_context: ReqContext,
    ) -> Any:  # noqa: ANN401 - vLLM's CacheHitSource; no override before vLLM 0.32
        """Say where a hit's bytes came from."""
        (own,) = _own_keys((key,), req_context)
        return DISK_HIT if self._service.load_source(own) else HOST_HIT

    @override
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """End a load: what a worker could not load is dropped, and missed by its request."""
        self._service.complete_load(req_context.req_id)

    # -- store ---------------------------------------------------------------------------------

    @override
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Give new chunks RAM slots; None when there is no room now."""
        content = content_of(req_context)
        if content is not None and not content.is_current():
            # Some of it may be computed with another content.
            plan: StorePlan | None = StorePlan([], [], 0, [])
        elif not self._has_own_blocks(req_context.req_id):
            plan = StorePlan([], [], 0, [])
        else:
            own = _own_keys(keys, req_context)
            plan = self._service.prepare_store(own, req_context.req_id)
        if plan is None:
            return None
        return PrepareStoreOutput(
            keys_to_store=_their_keys(plan.keys),
            store_spec=SlotLoadStoreSpec(plan.slots, [plan.generation] * len(plan.slots)),
            evicted_keys=_their_keys(plan.evicted),
        )

    @override
    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
    ) -> None:
        """Make stored chunks hits if every worker recorded that they are whole."""
        self._service.complete_store(_own_keys(keys, req_context), req_context.req_id)

    # -- steps ---------------------------------------------------------------------------------

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Close a scheduling step: start promotions and demotions."""
        if not self.believes_tables:
            self._note_tables(context)
        self._service.end_step(started=context.new_req_ids, preempted=context.preempted_req_ids)

    def _note_tables(self, context: ScheduleEndContext) -> None:
        """Note whose blocks vLLM's half was told once, and whose again.

        With some of vLLM's runners a preempted request is a new one, too; by then the half has
        forgotten its blocks.
        """
        tables = self._tables
        for req_id in context.preempted_req_ids:
            tables[req_id] = _Table.FORGOTTEN
        for req_id in context.new_req_ids:
            known = tables.get(req_id, _Table.FORGOTTEN)
            tables[req_id] = _Table.TOLD if known is _Table.FORGOTTEN else _Table.MUDDLED

    def _has_own_blocks(self, req_id: str) -> bool:
        """Return whether the half offers the blocks that are the request's own."""
        table = self._tables.get(req_id)
        if table is _Table.FORGOTTEN:
            self._tables[req_id] = _Table.TOLD  # or it would offer nothing
        return table is not _Table.MUDDLED

    @property
    def rests(self) -> bool:
        """Whether :meth:`on_schedule_end` would find nothing to do."""
        return self._service.rests

    @override
    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping while no request runs."""
        return self._service.has_pending_work()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Yield residency changes, removals before the stores that use their room."""
        for event in self._service.take_events():
            yield OffloadingEvent(
                keys=_their_keys(event.keys),
                removed=event.removed,
                **self._tiers[event.tier],
                **EVENT_EXTRAS,
            )

    @override
    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what changed since it was last told, if it is time to say so.

        vLLM asks once after each step.
        """
        if self._reporter is None:
            return None
        try:
            return self._reporter.report()
        except Exception as error:  # noqa: BLE001 - the top of a call from the engine
            self._service.note_internal_error("get_stats", error)
            return None

    def statistics(self) -> EngineStatistics:
        """Return all figures of this engine now."""
        return self._service.statistics()

    # -- reset and shutdown --------------------------------------------------------------------

    @override
    def reset_cache(self) -> None:
        """Make everything in every tier a miss, for good: weights may have changed.

        It is the last that is heard before an engine sleeps, so no store is under way then.
        """
        wait_for_stores_here()
        self.owes_reset = not self._service.reset_cache()

    @override
    def shutdown(self) -> None:
        """Bring dirty chunks down, close the tiers and free the memory. Idempotent."""
        self._service.shutdown()


def _own_keys(keys: Collection[OffloadKey], req_context: ReqContext) -> list[ChunkKey]:
    """Return kvtier's keys of chunks of a request."""
    content = content_of(req_context)
    return list(keys) if content is None else [content.key(key) for key in keys]


def _their_keys(keys: Collection[ChunkKey]) -> list[OffloadKey]:
    """Return vLLM's keys of chunks, of whatever requests."""
    return [OffloadKey(without_adapter(key)) for key in keys]


def _always() -> bool:
    return True


def _place(name: str, index: int) -> dict[str, Any]:
    """Return what an event says of where chunks are: the medium, and of several the tier."""
    if not index:
        return {"medium": RAM_MEDIUM}
    return {"medium": STORAGE_MEDIUM} | ({"ownership": name} if NAMES_TIERS else {})
