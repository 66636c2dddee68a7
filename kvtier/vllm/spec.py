"""kvtier behind vLLM's ``OffloadingConnector``: ``KVTierOffloadingSpec``.

This entry point is for setups that name an offloading spec. vLLM's own scheduler and worker
sides call kvtier's manager and worker. vLLM's sides cannot report a failed load, and they store
wrong KV in some configurations. So this entry point serves only models with one KV cache group
of full attention and without LoRA adapters. For other models its error recommends
``KVTierConnector``.

vLLM's worker side asserts that every job succeeded. So every store is reported as a success.
The control block in shared memory records which slots have all their bytes. A failed load is
reported as a failure and ends the engine. Otherwise the engine would compute wrong tokens from
missing bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TransferResult,
)

from kvtier.config import KvtierConfig, VllmEntryPoint
from kvtier.connector.device import DeviceEngine
from kvtier.connector.metrics import METRICS, Kind, Metric, Reporter
from kvtier.connector.service import CacheService
from kvtier.errors import UnsupportedError
from kvtier.logs import get_logger
from kvtier.manager import NOTHING_TO_STORE, GroupReach
from kvtier.memory.copy import KVBlocks
from kvtier.memory.copy_plan import BlockCopyPlan
from kvtier.memory.slot_layout import RankShare
from kvtier.types import Purpose
from kvtier.vllm.content import kv_content
from kvtier.vllm.engine import EngineFacts, data_parallel_rank
from kvtier.vllm.opening import open_cache, open_device, read_settings
from kvtier.vllm.pages import SlotShape
from kvtier.vllm.refusals import refuse_layout, warn_of_restarts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

__all__ = ["KVTierOffloadingSpec"]

logger = get_logger(__name__)

_USE_CONNECTOR = "use KVTierConnector, which `kvtier vllm-args` prints"
_FULL_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")


class KVTierOffloadingSpec(OffloadingSpec):
    """Builds kvtier's manager and worker for vLLM's OffloadingConnector.

    Args:
        config: vLLM's offloading configuration; ``kvtier_config`` in
            ``kv_connector_extra_config`` is the path of kvtier's own file.

    Raises:
        ConfigError: The file is missing or wrong, or does not fit vLLM's settings.
        UnsupportedError: This entry point does not support the engine.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._engine = engine = _read_config(config)
        self._settings = read_settings(engine, VllmEntryPoint.SPEC)
        refuse_layout(engine, self._settings)
        if self._settings.tiers[-1].is_shared:
            raise UnsupportedError(f"a shared tier needs KVTierConnector; {_USE_CONNECTOR}")
        if len(engine.groups) != 1:
            raise UnsupportedError(
                f"this model has {len(engine.groups)} KV cache groups, and an offloading spec "
                f"serves one: {_USE_CONNECTOR}"
            )
        self._manager: _Manager | None = None
        self._worker: _Worker | None = None

    @classmethod
    @override
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Return every metric that kvtier may report."""
        return {name: _definition(metric) for name, metric in METRICS.items()}

    @override
    def get_manager(self) -> OffloadingManager:
        """Return the scheduler's manager; the first call opens the tiers."""
        if self._manager is None:
            reaches = [GroupReach(self._engine.chunk_tokens)]
            cache = open_cache(self._engine, self._settings, reaches)
            self._manager = _Manager(cache, self._settings)
        return self._manager

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return a worker. The first rank creates the memory; the others attach.

        Raises:
            UnsupportedError: This entry point does not support the engine.
        """
        if self._worker is not None:
            raise UnsupportedError(
                "this process has the worker of another engine: end that engine first"
            )
        engine, settings = self._engine, self._settings
        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is None:
            raise UnsupportedError(f"vLLM sets no configuration here: {_USE_CONNECTOR}")
        _require_served(vllm_config, engine)
        if engine.rank == 0:
            warn_of_restarts(vllm_config, settings)
        groups = [
            [(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        kv = KVBlocks([block.tensor for block in kv_caches.tensors], groups)
        shape = SlotShape(
            block_nbytes=sum(nbytes for _, nbytes in groups[0]) * engine.world_size,
            share=RankShare(engine.rank, engine.world_size),
            is_portable=False,
        )
        content = kv_content(vllm_config, engine)
        self._worker = _Worker(open_device(engine, settings, kv, shape, content=content))
        return self._worker


def _read_config(config: OffloadingConfig) -> EngineFacts:
    """Return an engine's facts, read from the configuration of an offloading spec."""
    parallel, cache = config.parallel, config.cache
    groups = tuple(
        (group.tokens_per_block, tuple(group.layer_names)) for group in config.groups
    )
    group_ids = tuple(group.group_id for group in config.groups)
    return EngineFacts(
        engine_id=config.engine_id,
        extra_config=config.extra_config,
        records_events=config.enable_kv_cache_events,
        model_name=config.model.name,
        kv_dtype=config.model.dtype,
        kv_layout=config.kv_cache_layout or "",
        canonical_layout=config.canonical_layout,
        groups=groups,
        group_ids=group_ids,
        counting_group=min(group_ids, default=0),
        tokens_per_hash=cache.tokens_per_hash,
        blocks_per_chunk=cache.blocks_per_chunk,
        worker_kv_bytes_per_block=config.worker_kv_bytes_per_block,
        rank=parallel.rank,
        world_size=parallel.world_size,
        tp_size=parallel.tp_size,
        pp_size=parallel.pp_size,
        pcp_size=parallel.pcp_size,
        dcp_size=parallel.dcp_size,
        data_parallel_rank=data_parallel_rank(parallel, config.engine_id),
    )


def _require_served(vllm_config: VllmConfig, engine: EngineFacts) -> None:
    """Refuse engines for which vLLM's OffloadingConnector stores or loads wrong KV."""
    if vllm_config.lora_config is not None:
        raise UnsupportedError(
            f"an offloading spec is not told which LoRA adapter a request has: {_USE_CONNECTOR}"
        )
    layers: Any = vllm_config.compilation_config.static_forward_context
    for layer in engine.groups[0][1]:
        kind = type(layers[layer].get_kv_cache_spec(vllm_config)).__name__
        if kind not in _FULL_ATTENTION:
            raise UnsupportedError(
                f"layer {layer} keeps {kind}, and an offloading spec serves full attention "
                f"only: {_USE_CONNECTOR}"
            )
    if engine.rank == 0:
        logger.warning(
            "with the offloading spec, a failed load ends the engine; so does a reset with "
            "reset_running_requests while a request loads; %s",
            _USE_CONNECTOR,
        )


class _SlotLoadStoreSpec(LoadStoreSpec):
    """The RAM slots of a job, with generations that a store sets and a load requires."""

    def __init__(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        self.slots = list(slots)
        self.generations = list(generations)


class _Manager(OffloadingManager):
    """The manager that vLLM's scheduler calls. Its methods never raise.

    vLLM looks chunks up one by one, so the hits of a request are collected until the step ends.
    """

    def __init__(self, cache: CacheService, settings: KvtierConfig) -> None:
        self._cache = cache
        self._tiers = [tier.name for tier in settings.tiers]
        self._reporter = Reporter(cache)
        self._found: dict[str, list[OffloadKey]] = {}
        self._wanting: set[str] = set()
        self._deferred: set[str] = set()
        self._started: set[str] = set()
        self._continued: set[str] = set()
        """Requests whose streamed prompt has been continued. Such requests store nothing,
        because vLLM confuses their blocks."""

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Register a request and read its hints."""
        self._cache.begin_request(req_context)
        return RequestOffloadingContext(policy=OffloadPolicy.CHUNK_LEVEL)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget a request. Its loads and stores in flight continue."""
        self._started.discard(req_context.req_id)
        self._continued.discard(req_context.req_id)
        self._cache.end_request(req_context)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a chunk can be loaded now, later or not at all."""
        req_id = req_context.req_id
        if self._cache.is_deferred(req_id):
            # RETRY repeats the lookup at the next step; MISS ends the scan of the prefix.
            if req_id in self._deferred:
                return LookupResult.MISS
            self._deferred.add(req_id)
            return LookupResult.RETRY
        tier = self._cache.residence(key, req_id)
        if tier is None:
            return LookupResult.MISS
        self._found.setdefault(req_id, []).append(key)
        if tier == 0:
            return LookupResult.HIT
        self._wanting.add(req_id)
        return LookupResult.HIT_PENDING

    @override
    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> LoadStoreSpec:
        """Pin chunks that were hits in this step and return their slots."""
        plan = self._cache.prepare_load(list(keys), req_context.req_id)
        return _SlotLoadStoreSpec(plan.slots, plan.generations)

    @override
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Complete a request's oldest load."""
        self._cache.complete_load(keys, req_context)

    @override
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Allocate RAM slots for new chunks; return None if there are too few slots now."""
        req_id = req_context.req_id
        plan = (
            NOTHING_TO_STORE
            if req_id in self._continued
            else self._cache.prepare_store(list(keys), req_id)
        )
        if plan is None:
            return None
        return PrepareStoreOutput(
            keys_to_store=[OffloadKey(key) for key in plan.keys],
            store_spec=_SlotLoadStoreSpec(plan.slots, [plan.generation] * len(plan.slots)),
            evicted_keys=[OffloadKey(key) for key in plan.evicted],
        )

    @override
    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """End a store: chunks that every worker stored completely become hits.

        The workers record this for each chunk, so ``success`` is not used.
        """
        self._cache.complete_store(list(keys), req_context)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """End a scheduling step, and start promotions and demotions."""
        for req_id in context.preempted_req_ids:
            self._started.discard(req_id)
        started = set(context.new_req_ids)
        self._continued |= self._started & started
        self._started |= started
        for req_id in self._wanting:
            self._cache.fetch(self._found[req_id], req_id)
        for each in (self._wanting, self._found, self._deferred):
            each.clear()
        self._cache.end_step(started=context.new_req_ids, preempted=context.preempted_req_ids)

    @override
    def has_pending_work(self) -> bool:
        """Return whether the engine must keep stepping while no request runs."""
        return self._cache.has_pending_work()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Yield the events of chunks that entered or left a tier, in order.

        The removal of a chunk comes before the arrival of the next chunk in its slot.
        """
        for event in self._cache.take_events():
            yield OffloadingEvent(
                keys=[OffloadKey(key) for key in event.keys],
                medium=Medium.STORAGE if event.tier else Medium.CPU,
                removed=event.removed,
                ownership=self._tiers[event.tier] if event.tier else None,
            )

    @override
    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return the changes since the last call; vLLM calls this once after each step."""
        changes = self._reporter.take()
        if not changes:
            return None
        stats = OffloadingConnectorStats()
        for name, labels, value in changes:
            kind = METRICS[name].kind
            if kind is Kind.COUNTER:
                stats.increase_counter(name, value, labels)
            elif kind is Kind.GAUGE:
                stats.set_gauge(name, value, labels)
            else:
                for observation in value:
                    stats.observe_histogram(name, observation, labels)
        return stats

    @override
    def reset_cache(self) -> None:
        """Make every stored chunk a miss."""
        self._found.clear()
        self._wanting.clear()
        self._cache.reset_cache()

    @override
    def shutdown(self) -> None:
        """Demote dirty chunks, close the tiers and free the memory. Idempotent."""
        self._cache.shutdown()


class _Worker(OffloadingWorker):
    """Copies one rank's blocks to and from RAM slots; vLLM's worker side calls it."""

    def __init__(self, device: DeviceEngine) -> None:
        self._device = device

    @override
    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Start to copy blocks to RAM slots."""
        self._submit(job_id, Purpose.STORE, src_spec, dst_spec)
        return True

    @override
    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Start to copy RAM slots to blocks."""
        self._submit(job_id, Purpose.LOAD, dst_spec, src_spec)
        return True

    @override
    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last call."""
        finished = []
        self._device.begin_stores()
        for result in self._device.poll():
            is_lost = result.destination == "gpu" and not result.is_whole
            if is_lost:
                logger.critical(
                    "refusing to continue a request on KV that was not loaded: %s", result.error
                )
            finished.append(
                TransferResult(
                    job_id=result.job_id,
                    success=not is_lost,
                    transfer_size=result.nbytes,
                    transfer_time=result.seconds,
                )
            )
        return finished

    @override
    def wait(self, job_ids: set[int]) -> None:
        """Wait for the jobs ``job_ids`` before the engine overwrites their blocks."""
        self._device.wait(job_ids)

    @override
    def shutdown(self) -> None:
        """Let running copies end and release the memory. Idempotent."""
        try:
            self._device.close()
        except Exception:
            # Not raised, because an engine in one process shuts its manager down next.
            logger.exception("shutdown: a worker's memory may not be freed")

    def _submit(
        self, job_id: int, purpose: Purpose, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec
    ) -> None:
        if not isinstance(chunks, _SlotLoadStoreSpec):
            raise UnsupportedError(
                f"vLLM gives kvtier's worker a {type(chunks).__name__}, which kvtier's manager "
                "did not build"
            )
        try:
            plan: BlockCopyPlan = self._device.plan(
                blocks.block_ids, blocks.group_sizes, blocks.block_indices, chunks.slots
            )
            start = self._device.store if purpose is Purpose.STORE else self._device.load
            start(job_id, plan, chunks.generations)
        except Exception as error:
            logger.exception("%s %d was not started", purpose.name.lower(), job_id)
            self._device.fail(job_id, purpose, chunks.slots, chunks.generations, error)


def _definition(metric: Metric) -> OffloadingMetricMetadata:
    match metric.kind:
        case Kind.COUNTER:
            return OffloadingCounterMetadata(metric.help, metric.labels)
        case Kind.GAUGE:
            return OffloadingGaugeMetadata(metric.help, metric.labels)
        case Kind.HISTOGRAM:
            return OffloadingHistogramMetadata(metric.help, metric.labels, metric.buckets)
