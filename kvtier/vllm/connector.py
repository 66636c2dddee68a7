"""The recommended door: vLLM's OffloadingConnector, plus the means to say that a load failed.

vLLM's scheduler half and worker half do what they always do. What is added is in the worker:
a job that did not work is acknowledged like any other, so nothing in vLLM's half asserts on it,
and vLLM's scheduler is told what did not arrive: it computes that (``kv_load_failure_policy:
recompute``) or fails the request alone (``fail``). With one KV cache group it is told the
blocks, so what came before the first bad one is kept. With several a block's number does not
say whose it is; there the request is named, which vLLM knows since 0.30, and computed from its
start.

That the chunks must not be tried again for this request goes another way, through the control
block: the worker has written there which stamps it could not load, and vLLM calls
``complete_load`` when every rank is done, before it asks for the request again.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, base
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)

from kvtier.connector.pace import prompt_tokens
from kvtier.errors import UnsupportedError
from kvtier.vllm.contract import OffloadingConnectorStats
from kvtier.vllm.manager import KVTierManager
from kvtier.vllm.metrics import add_device_transfers
from kvtier.vllm.spec import KVTierConnectorSpec
from kvtier.vllm.worker import KVTierWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorTransferResults,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import GPULoadStoreSpec

__all__ = ["KVTierConnector"]

logger = logging.getLogger(f"vllm.{__name__}")  # below the one logger vLLM configures

_TAKES_NAMES: Final = hasattr(base, "KVConnectorTransferResults")
"""Whether this vLLM takes the names of requests whose load failed; before, only blocks."""


class KVTierConnector(OffloadingConnector):
    """kvtier behind vLLM's connector interface; loaded by ``kv_connector_module_path``.

    Args:
        vllm_config: vLLM's configuration; ``kv_connector_extra_config["kvtier_config"]`` is
            the path of kvtier's own file.
        role: Which half this is.
        kv_cache_config: The engine's KV cache groups.

    Raises:
        ConfigError: The file is missing or wrong, or does not fit how vLLM was started.
        UnsupportedError: This vLLM or this layout is not supported.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(_with_spec(vllm_config), role, kv_cache_config)
        self._one_group = len(kv_cache_config.kv_cache_groups) == 1
        if not (self._one_group or _TAKES_NAMES):
            raise UnsupportedError(
                "before vLLM 0.30 a load that fails can be reported only for models with one "
                "KV cache group: use what `kvtier vllm-args --door spec` prints"
            )
        self._loading: dict[int, tuple[str, frozenset[int]]] = {}
        self._failed_requests: set[str] = set()
        self._failed_blocks: set[int] = set()
        transfer = vllm_config.kv_transfer_config
        if role == KVConnectorRole.SCHEDULER and transfer.kv_load_failure_policy == "fail":
            logger.warning(
                "kv_load_failure_policy is fail, vLLM's default: a request whose chunks cannot "
                "be loaded ends with an error; with recompute it is computed instead"
            )

    # -- scheduler half ------------------------------------------------------------------------

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return what the workers are to do, and note how much is computed meanwhile."""
        manager = self.connector_scheduler.manager
        if isinstance(manager, KVTierManager):
            manager.computing(prompt_tokens(scheduler_output.num_scheduled_tokens.values()))
        return super().build_connector_meta(scheduler_output)

    @override
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what changed since the last call, in vLLM's names and in kvtier's."""
        stats = super().get_kv_connector_stats()
        if isinstance(stats, OffloadingConnectorStats):
            add_device_transfers(stats)
        return stats

    # -- worker half ---------------------------------------------------------------------------

    @override
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start this step's loads, and remember whose they are."""
        for job_id, job in self._connector_metadata.load_jobs.items():
            blocks: GPULoadStoreSpec = job.dst_spec
            self._loading[job_id] = (job.req_id, frozenset(map(int, blocks.block_ids)))
        super().start_load_kv(forward_context, **kwargs)

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return requests whose transfers are over, well or not."""
        sent, received = super().get_finished(finished_req_ids)
        worker = self.connector_worker.worker
        if isinstance(worker, KVTierWorker):
            self._note_failures(worker)
        return sent, received

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return requests whose transfers are over, and those of them whose load failed."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = self._failed_requests & results.finished_recving
        self._failed_requests -= results.failed_recving
        return results

    @override
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks whose content must not be used."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def _note_failures(self, worker: KVTierWorker) -> None:
        for job_id, load in worker.take_ended_loads().items():
            req_id, blocks = self._loading.pop(job_id)
            if load.is_whole:
                continue
            logger.warning("the load of request %s failed: %s", req_id, load.error)
            if not self._one_group:
                self._failed_requests.add(req_id)
            else:
                self._failed_blocks |= blocks if load.lost_blocks is None else load.lost_blocks

    # -- front end -----------------------------------------------------------------------------

    @classmethod
    @override
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Declare kvtier's metrics beside vLLM's own."""
        return super().build_prom_metrics(
            _with_spec(vllm_config), metric_types, labelnames, per_engine_labelvalues
        )


def _with_spec(vllm_config: VllmConfig) -> VllmConfig:
    """Return a copy of ``vllm_config`` that names the spec of this door."""
    transfer = copy.copy(vllm_config.kv_transfer_config)
    transfer.kv_connector_extra_config = {
        **transfer.kv_connector_extra_config,
        "spec_name": KVTierConnectorSpec.__name__,
        "spec_module_path": KVTierConnectorSpec.__module__,
    }
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = transfer
    return changed
