"""kvtier behind vLLM's connector interface: ``KVTierConnector``.

vLLM builds one object in the scheduler's process and one in every worker. Each object is a thin
layer over kvtier's own scheduler side or worker side, which are independent of vLLM
(:mod:`kvtier.connector.scheduler`, :mod:`kvtier.connector.worker`).

**Failed loads.** A worker acknowledges every load and reports the missing chunks. vLLM's
scheduler then computes these chunks (``kv_load_failure_policy: recompute``) or fails only that
request (``fail``). If the only KV cache group has full attention, the report names blocks, and
vLLM keeps the prefix before the first bad block. With other groups the report names the
request. There are two reasons: a block's number does not identify the block's group, and a
group with a sliding window loads only the end of the prefix.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvtier.config import KvtierConfig, VllmEntryPoint
from kvtier.connector.groups import CacheGroup, SchedulerOptions, build_layouts
from kvtier.connector.metadata import ConnectorMetadata, WorkerOutput
from kvtier.connector.metrics import Reporter
from kvtier.connector.requests import chunk_positions
from kvtier.connector.scheduler import NOTHING_TO_DO, ConnectorScheduler
from kvtier.connector.worker import ConnectorWorker
from kvtier.errors import UnsupportedError
from kvtier.logs import get_logger
from kvtier.manager import Reach
from kvtier.vllm.adapters import AdapterContents
from kvtier.vllm.content import kv_content
from kvtier.vllm.engine import EngineFacts, read_vllm_config
from kvtier.vllm.kinds import cache_groups
from kvtier.vllm.metrics import KVTierPromMetrics, KVTierStats
from kvtier.vllm.opening import open_cache, open_device, read_settings
from kvtier.vllm.pages import find_pages, share_slots, wanted_layout
from kvtier.vllm.refusals import refuse_layout, warn_of_restarts
from kvtier.vllm.steps import StepReader
from kvtier.vllm.versions import hit_sources, require_supported_vllm

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["KVTierConnector"]

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Metadata(KVConnectorMetadata):
    """The workers' jobs of one step."""

    jobs: ConnectorMetadata


_NOTHING = _Metadata(NOTHING_TO_DO)


@dataclass(frozen=True, slots=True)
class _WorkerMetadata(KVConnectorWorkerMetadata):
    """The results of one rank, or the aggregated results of all ranks."""

    output: WorkerOutput

    @override
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return these results combined with those of ``other``."""
        if not isinstance(other, _WorkerMetadata):
            raise UnsupportedError(
                f"vLLM aggregates worker results of kvtier with a {type(other).__name__}"
            )
        return _WorkerMetadata(self.output.aggregate(other.output))


_workers: weakref.WeakKeyDictionary[ConnectorWorker, str] = weakref.WeakKeyDictionary()
"""Workers of this process, each with the id of the worker's engine. An engine that runs in the
process of its ``LLM`` does not wait for the connector before it sleeps. So the cache reset
before the sleep waits for the stores of the engine's workers."""


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):
    """kvtier behind vLLM's connector interface; loaded by ``kv_connector_module_path``.

    Args:
        vllm_config: vLLM's configuration; ``kv_connector_extra_config["kvtier_config"]`` is
            the path of kvtier's own file.
        role: Scheduler side or worker side.
        kv_cache_config: The engine's KV cache groups.

    Attributes:
        cache: The cache. Only the scheduler side has it.

    Raises:
        ConfigError: The file is missing or wrong, or does not fit vLLM's settings.
        UnsupportedError: This vLLM, model or layout is not supported.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        require_supported_vllm(type(self))
        super().__init__(vllm_config, role, kv_cache_config)
        self._vllm = vllm_config
        self._kv = kv_cache_config
        self._groups = cache_groups(kv_cache_config)
        self._engine = read_vllm_config(vllm_config, kv_cache_config, self._groups)
        self._settings = read_settings(self._engine, VllmEntryPoint.CONNECTOR)
        refuse_layout(self._engine, self._settings)
        reaches = [group.reach for group in self._groups]
        is_single_group = len(kv_cache_config.kv_cache_groups) == 1
        self._reports_blocks = is_single_group and reaches == [Reach.PREFIX]
        self._worker: ConnectorWorker | None = None
        self._bound: _Metadata = _NOTHING
        self._output: WorkerOutput | None = None
        self._reporter: Reporter | None = None
        self._is_generating = False
        """Whether the last step only generated tokens and no request has ended since."""
        if role is KVConnectorRole.SCHEDULER:
            self._open_scheduler()

    @property
    @override
    def requires_kv_delivery(self) -> bool:
        """Whether every store must succeed; False, because a cache may lose chunks."""
        return False

    # -- scheduler side: requests --------------------------------------------------------------

    def _open_scheduler(self) -> None:
        """Attach to the workers' memory and open the tiers."""
        settings, engine = self._settings, self._engine
        options = _scheduler_options(self._vllm, engine, self._groups, settings)
        reaches = [layout.reach for layout in build_layouts(options)]
        self.cache = open_cache(engine, settings, reaches, chunk_positions)
        with ExitStack() as opened:
            opened.callback(self.cache.shutdown)
            self._scheduler = ConnectorScheduler(self.cache, options)
            self._steps = StepReader(self._vllm, self._kv)
            self._adapters = AdapterContents(self._vllm.lora_config)
            self._reporter = Reporter(self.cache)
            warn_of_restarts(self._vllm, settings)
            opened.pop_all()
        transfer = self._vllm.kv_transfer_config
        if transfer is not None and transfer.kv_load_failure_policy == "fail":
            logger.warning(
                "kv_load_failure_policy is fail, vLLM's default: a request whose chunks cannot "
                "be loaded ends with an error; with recompute the missing tokens are computed"
            )

    @override
    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Keep a reference to the engine's block tables."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._tables = self._scheduler.tables = kv_cache_manager

    @override
    def on_new_request(self, request: Request) -> None:
        """Register a new request, and the content of its LoRA adapter if it has one."""
        adapter = request.lora_request
        if adapter is None:
            self._scheduler.on_new_request(request)
        else:
            content = self._adapters.content_of(adapter)
            self._scheduler.on_new_request(
                request, name_chunk=content.key, may_store=content.is_current
            )

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded, and whether the load is asynchronous."""
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    @override
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load into the blocks that a request got."""
        self._steps.note_allocation(blocks)
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """Return how many loaded tokens came from host memory, and how many from disk."""
        host, disk = hit_sources()
        found: dict[Any, int] = {}
        for tier, tokens in self._scheduler.load_sources(request.request_id).items():
            source = disk if tier else host
            found[source] = found.get(source, 0) + tokens
        return found if num_external_tokens else {}

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the workers' jobs of this step."""
        self._is_generating = (
            self._steps.only_generates(scheduler_output) and self._scheduler.pass_step()
        )
        if self._is_generating:
            self.cache.step_scheduled(0)
            self._adapters.begin_step()
            return _NOTHING
        step = self._steps.read(scheduler_output, self._tables)
        self.cache.step_scheduled(step.prompt_tokens)
        self._adapters.begin_step()
        jobs = self._scheduler.build_connector_meta(step)
        self._adapters.begin_step()  # requests that end have KV of this step
        return _NOTHING if jobs is NOTHING_TO_DO else _Metadata(jobs)

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the workers' results."""
        metadata = connector_output.kv_connector_worker_meta
        # Most steps have no results, and a look at an abstract class takes 3 us.
        if metadata is not None and isinstance(metadata, _WorkerMetadata):
            self._scheduler.update_connector_output(metadata.output)

    @override
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer the request's last chunks to the cache; vLLM may free the request's blocks."""
        self._is_generating = False
        self._scheduler.request_finished(request)
        return False, None

    @override
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer the request's last chunks to the cache; vLLM may free the request's blocks."""
        self._is_generating = False
        self._scheduler.request_finished(request)
        return False, None

    @override
    def has_pending_push_work(self) -> bool:
        """Return whether the engine must keep stepping while no request runs."""
        return self._scheduler.has_pending_work()

    # -- scheduler side: events, figures, reset ------------------------------------------------

    @override
    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return the events of chunks that entered or left a tier, in order.

        The removal of a chunk comes before the arrival of the next chunk in its slot.
        """
        if not self._engine.records_events:
            return ()
        from kvtier.vllm.events import kv_events  # noqa: PLC0415 - only with a listener

        return kv_events(self.cache.take_events(), [tier.name for tier in self._settings.tiers])

    @override
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the changes since the last call; vLLM calls this once after each step."""
        if self._reporter is None:
            return None
        self.cache.step_ended()
        if not self._reporter.is_due(steps_follow=self._is_generating):
            return None
        changes = self._reporter.take()
        return KVTierStats.of(changes) if changes else None

    @override
    def reset_cache(self) -> bool | None:
        """Make every stored chunk a miss.

        Returns:
            True if the reset survives a restart and every worker in this process has ended its
            stores. If False, vLLM neither sleeps nor frees the blocks.
        """
        own = [
            worker for worker, engine in _workers.items() if engine == self._engine.engine_id
        ]
        stores_ended = [worker.wait_for_stores() for worker in own]
        return self._scheduler.reset_cache() and all(stores_ended)

    @override
    def shutdown(self) -> None:
        """Demote dirty chunks, close the tiers and free the memory. Idempotent."""
        if self._worker is not None:
            _workers.pop(self._worker, None)
            try:
                self._worker.shutdown()
            except Exception:
                # Not raised, because an engine in one process shuts its scheduler down next.
                logger.exception("shutdown: a worker's memory may not be freed")
        if self.role is KVConnectorRole.SCHEDULER:
            self._adapters.close()
            self.cache.shutdown()

    # -- worker side ---------------------------------------------------------------------------

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register a rank's KV memory. The first rank creates the RAM tier; the others attach.

        Raises:
            UnsupportedError: kvtier does not store memory of this kind.
        """
        engine, settings = self._engine, self._settings
        layout, groups = engine.kv_layout, engine.group_ids
        kv = find_pages(kv_caches, self._kv, groups, layout)
        shape = share_slots(self._vllm, self._kv, kv_caches, kv, groups, layout)
        content = kv_content(self._vllm, engine)
        device = open_device(engine, settings, kv, shape, content=content)
        self._worker = ConnectorWorker(device, ram_name=settings.ram.name)
        _workers[self._worker] = engine.engine_id

    @override
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Save the jobs that the scheduler side built for this step."""
        self._bound = _own_metadata(connector_metadata)

    @override
    def clear_connector_metadata(self) -> None:
        """Forget the jobs of the step that ended."""
        self._bound = _NOTHING

    @override
    def has_connector_metadata(self) -> bool:
        """Return False, so that the model does not wait for this connector at each layer."""
        return False

    @override
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Wait for stores whose blocks the engine reuses."""
        if self._worker is not None:
            self._worker.handle_preemptions(_own_metadata(kv_connector_metadata).jobs)

    @override
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start this step's loads."""
        if self._worker is not None:
            self._worker.start_load(self._bound.jobs)

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once, because a load ends before its request runs."""

    @override
    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Return at once, because stores start after the step."""

    @override
    def wait_for_save(self) -> None:
        """Start the last step's stores, and defer this step's stores to the next step."""
        if self._worker is not None:
            self._worker.defer_stores(self._bound.jobs)

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return an empty set for stores, and the requests whose loads ended or failed."""
        results = self.get_transfer_results(finished_req_ids)
        return set(), results.finished_recving

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests with ended loads, and the requests with failed loads."""
        if self._worker is None:
            return KVConnectorTransferResults()
        loaded = self._worker.get_finished()
        output = self._worker.take_output()
        if output is None:
            return KVConnectorTransferResults()
        # vLLM may ask again before it takes the output: each job is acknowledged only once.
        self._output = output if self._output is None else self._output.aggregate(output)
        failed = set() if self._reports_blocks else set(output.failed_requests)
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    @override
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks with invalid content; empty if failures are reported per request."""
        if self._output is None or not self._reports_blocks:
            return set()
        return set(self._output.invalid_block_ids)

    @override
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return this rank's results since the last step; None without results."""
        output, self._output = self._output, None
        return None if output is None else _WorkerMetadata(output)

    # -- front end -----------------------------------------------------------------------------

    @classmethod
    @override
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the KV cache layout with the longest contiguous ranges."""
        return wanted_layout(vllm_config)

    @classmethod
    @override
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Return a :class:`KVTierStats` with ``data``."""
        return KVTierStats(data=data or {})

    @classmethod
    @override
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Create kvtier's Prometheus metrics."""
        return KVTierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _own_metadata(metadata: KVConnectorMetadata) -> _Metadata:
    """Check that kvtier's scheduler side built ``metadata``, and return it.

    Raises:
        UnsupportedError: Another connector built ``metadata``.
    """
    if not isinstance(metadata, _Metadata):
        raise UnsupportedError(
            f"vLLM gives kvtier's worker a {type(metadata).__name__}, which kvtier's scheduler "
            "side did not build"
        )
    return metadata


def _scheduler_options(
    vllm_config: VllmConfig,
    engine: EngineFacts,
    groups: tuple[CacheGroup, ...],
    settings: KvtierConfig,
) -> SchedulerOptions:
    cache = vllm_config.cache_config
    return SchedulerOptions(
        groups=groups,
        tokens_per_hash=engine.tokens_per_hash,
        blocks_per_chunk=engine.blocks_per_chunk,
        ranks=engine.world_size,
        store_decode=settings.engine.store_decode,
        retention_tokens=cache.prefix_cache_retention_interval,
        shares_blocks=bool(cache.enable_prefix_caching),
        continues_from_right_kv=not _may_continue_from_wrong_kv(vllm_config, groups),
    )


def _may_continue_from_wrong_kv(
    vllm_config: VllmConfig, groups: tuple[CacheGroup, ...]
) -> bool:
    """Return whether later parts of a streamed prompt may be computed from wrong KV.

    When the next part of the prompt arrives, the request drops the last generated token. Under
    async scheduling the request's recurrent state still includes this token. With speculative
    decoding and without async scheduling, vLLM counts the accepted draft tokens after this
    token as computed.
    """
    has_states = any(group.reach is Reach.STATE for group in groups)
    if vllm_config.scheduler_config.async_scheduling:
        return has_states
    return vllm_config.speculative_config is not None
