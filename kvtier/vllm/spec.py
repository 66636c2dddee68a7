"""The first door: kvtier behind vLLM's OffloadingConnector.

vLLM's scheduler half drives, so hybrid models work as they do with vLLM's own offloading;
kvtier supplies the manager in the scheduler's process and the worker in each worker process.
The spec object is built in every one of them from the same configuration.
"""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import override

from kvtier.config import Door, load_config, own_paths, resolve_load_path
from kvtier.connector.service import CacheService
from kvtier.connector.storage import open_storage
from kvtier.errors import ConfigError, UnsupportedError
from kvtier.logs import get_logger
from kvtier.memory import HostRegion
from kvtier.vllm.adapters import positions_with_adapters
from kvtier.vllm.compat import (
    EngineFacts,
    adopt_chunk_size,
    clears_for_nobody,
    current_config,
    hands_over_lost_states,
    has_adapters,
    kept_by_layers,
    kv_content,
    read_engine,
    require_known_layers,
    require_supported_vllm,
    settle_layers,
    states_are_kept,
    worker_offers_late,
    worker_writes_to_blocks_first,
)
from kvtier.vllm.contract import (
    CHUNK_POSITIONS,
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from kvtier.vllm.corrections import late_stores_refused
from kvtier.vllm.layout import (
    fingerprint,
    require_supported_layout,
    warn_of_weak_hashes,
)
from kvtier.vllm.manager import KVTierManager
from kvtier.vllm.metrics import metric_definitions
from kvtier.vllm.slots import lay_out_slots, require_same_file
from kvtier.vllm.worker import KVTierWorker

__all__ = ["KVTierConnectorSpec", "KVTierOffloadingSpec"]

logger = get_logger(__name__)

_MEET_TIMEOUT_S = 600.0
"""How long the processes of one engine wait for each other; loading weights comes before it."""

_OFFER_TIMEOUT_S = 24 * 3600.0
"""How long the first worker offers its memory. vLLM makes the scheduler when all workers have
warmed up, which may take longer than anybody waits; if it makes none, the worker is ended."""

_ADAPTERS = " adapters"
"""Behind a store's content, says that its keys do not name adapters by what they hold. So such
a store is none of the connector's either."""


class KVTierOffloadingSpec(OffloadingSpec):
    """Builds kvtier's halves for vLLM.

    Args:
        arguments: vLLM's offloading configuration, or what vLLM 0.25 has instead: its own
            configuration and that of its KV cache. ``kvtier_config`` in
            ``kv_connector_extra_config`` is the path of kvtier's own file.

    Raises:
        ConfigError: The file is missing or wrong, or does not fit how vLLM was started.
        UnsupportedError: This vLLM or this layout is not supported.
    """

    _door: ClassVar[Door] = Door.SPEC

    def __init__(self, *arguments: Any) -> None:  # noqa: ANN401 - vLLM's configurations
        require_supported_vllm(KVTierManager, KVTierWorker)
        super().__init__(*arguments)
        adopt_chunk_size(self, arguments)
        self._engine = read_engine(self, arguments)
        path = self._engine.extra_config.get("kvtier_config")
        if not path:
            raise ConfigError(
                "kv_connector_extra_config has no kvtier_config: start vLLM with what "
                "`kvtier vllm-args FILE` prints"
            )
        settings = resolve_load_path(load_config(path), self._door)
        self._settings = own_paths(settings, rank=self._engine.data_parallel_rank)
        require_supported_layout(self._engine, self._settings)
        self._manager: KVTierManager | None = None
        self._worker: KVTierWorker | None = None
        self._registered: list[int] = []
        """Where the KV memory of the worker is."""

    @classmethod
    @override
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Return every metric kvtier may report."""
        return metric_definitions()

    @override
    def get_manager(self) -> OffloadingManager:
        """Return the scheduler half; attaches to the workers' memory and opens the tiers."""
        if self._manager is None:
            if self._door is Door.SPEC:
                logger.warning(
                    "reset_prefix_cache(reset_running_requests=True) while requests run ends "
                    "this engine in an assertion of vLLM's offloading connector: reset while "
                    "no request runs, or use KVTierConnector, what `kvtier vllm-args` prints"
                )
            settings = self._settings
            chunk_tokens = self._engine.chunk_tokens
            # The workers chose its shape: only they see how the KV memory is laid out.
            region = HostRegion.attach(self._engine.engine_id, timeout_s=_MEET_TIMEOUT_S)
            try:
                require_same_file(region.geometry, self._engine, settings)
                storage = open_storage(
                    settings,
                    region,
                    fingerprint(self._engine, settings, region.geometry),
                    tokens_per_chunk=chunk_tokens,
                    record_events=self._engine.records_events,
                    positions=positions_with_adapters(CHUNK_POSITIONS),
                    counting_group=self._engine.counting_group,
                )
            except BaseException:
                region.close()
                raise
            service = CacheService(
                storage,
                tokens_per_chunk=chunk_tokens,
                retain_s=settings.placement.retain_s or 0.0,
                close_timeout_s=settings.transfer.close_timeout_s,
            )
            if storage.tiers and region.geometry.content.endswith(_ADAPTERS):
                logger.warning(
                    "vLLM does not tell an offloading spec which LoRA adapter a request has, "
                    "and their content may have changed: every tier begins empty; use "
                    "KVTierConnector, what `kvtier vllm-args` prints, to keep what is stored"
                )
                service.reset_cache()
            self._manager = KVTierManager(
                service,
                persistent=bool(storage.tiers),
                report_metrics=settings.metrics.enabled,
            )
        return self._manager

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker half; the first worker creates the memory, the others attach.

        Raises:
            UnsupportedError: There is one, of other KV memory: vLLM keeps a worker's connector
                until the engine is shut down, and gives it to the next engine of the process.
        """
        addresses = [block.tensor.data_ptr() for block in kv_caches.tensors]
        if self._worker is None:
            self._registered = addresses
            rank = self._engine.rank
            name = self._engine.engine_id
            config = current_config()
            content = kv_content(config, self._engine)
            _require_known_layers(config, self._engine)
            if not rank:
                warn_of_weak_hashes(config, self._settings)
            if self._door is Door.SPEC:
                if has_adapters(config):
                    content += _ADAPTERS
                _require_stores_in_time(config, self._engine)
            settle_layers(config)
            geometry, share = lay_out_slots(
                self._engine, self._settings, kv_caches, content=content
            )
            region = (
                HostRegion.create(
                    name,
                    geometry,
                    attachers=self._engine.world_size,
                    timeout_s=_OFFER_TIMEOUT_S,
                    huge_pages=self._settings.ram.huge_pages,
                )
                if rank == 0
                else HostRegion.attach(name, geometry, timeout_s=_MEET_TIMEOUT_S)
            )
            try:
                self._worker = KVTierWorker(
                    kv_caches,
                    region,
                    rank=rank,
                    share=share,
                    blocks_per_chunk=self._engine.blocks_per_chunk,
                    close_timeout_s=self._settings.transfer.close_timeout_s,
                    reports_failed_loads=self._door is Door.CONNECTOR,
                )
            except BaseException:
                region.close()
                raise
        elif addresses != self._registered:
            raise UnsupportedError(
                "this process still has the workers of an engine that did not start, or was "
                "not shut down: start the engine in a new process"
            )
        return self._worker


class KVTierConnectorSpec(KVTierOffloadingSpec):
    """What :class:`~kvtier.vllm.connector.KVTierConnector` builds its halves from."""

    _door = Door.CONNECTOR


def _require_known_layers(config: Any, engine: EngineFacts) -> None:  # noqa: ANN401 - vLLM's
    """Refuse what layers keep of which nobody read how vLLM treats it, and warn of states."""
    kept = kept_by_layers(config)
    require_known_layers(engine, kept)
    if engine.blocks_per_chunk > 1 and engine.rank == 0 and states_are_kept(engine, kept):
        logger.warning(
            "this model keeps states, and of those in a chunk vLLM stores the last one only: "
            "chunks of %d blocks are never whole, so nothing is found again; write "
            "engine.blocks_per_chunk: 1",
            engine.blocks_per_chunk,
        )


def _require_stores_in_time(config: Any, engine: EngineFacts) -> None:  # noqa: ANN401 - vLLM's
    """Refuse what vLLM tells a connector in time to keep wrong KV out, and a spec not."""
    if worker_offers_late(config, engine):
        raise late_stores_refused(
            otherwise=", or use KVTierConnector: what `kvtier vllm-args` prints"
        )
    if worker_writes_to_blocks_first(config):
        raise UnsupportedError(
            "Model Runner V2 clears blocks of this model before it ends the stores that read "
            "them, of which an offloading spec is not told: use KVTierConnector, what `kvtier "
            "vllm-args` prints, or start vLLM with VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if clears_for_nobody(config):
        raise UnsupportedError(
            "with --scheduling-policy priority vLLM clears blocks of this model that stores "
            "may still read, of which an offloading spec is not told: use KVTierConnector, "
            "what `kvtier vllm-args` prints, or start vLLM without it"
        )
    if hands_over_lost_states(config):
        raise UnsupportedError(
            "with asynchronous scheduling and several guessed tokens a step vLLM hands over "
            "states of this model whose blocks it may have given to others, of which an "
            "offloading spec is not told: use KVTierConnector, what `kvtier vllm-args` prints, "
            "or start vLLM with --no-async-scheduling"
        )
