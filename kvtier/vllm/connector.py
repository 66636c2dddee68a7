"""The recommended door: vLLM's OffloadingConnector, plus the means to say that a load failed.

vLLM's scheduler half and worker half do what they always do. What is added is in the worker:
a job that did not work is acknowledged like any other, so nothing in vLLM's half asserts on it,
and vLLM's scheduler is told what did not arrive: it computes that (``kv_load_failure_policy:
recompute``) or fails the request alone (``fail``). With one KV cache group it is told the
blocks, so what came before the first bad one is kept. With several a block's number does not
say whose it is; there the request is named, which vLLM knows since 0.30, and computed from its
start.

With ``transfer.load_mode: layerwise`` requests whose chunks are whole in RAM are loaded within
the forward pass of their first step (:mod:`kvtier.vllm.in_step`). When that fails, the pass has
computed from KV that was not there: what it would have stored is not, and vLLM computes the
request again from the first bad block.

That the chunks must not be tried again for this request goes another way, through the control
block: the worker has written there which stamps it could not load, and vLLM calls
``complete_load`` when every rank is done, before it asks for the request again.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from kvtier.config import KvtierConfig, load_config
from kvtier.connector.pace import prompt_tokens
from kvtier.errors import UnsupportedError
from kvtier.vllm import compat
from kvtier.vllm.contract import OffloadingConnectorStats
from kvtier.vllm.in_step import InStepLoads, why_not_in_step
from kvtier.vllm.manager import KVTierManager
from kvtier.vllm.metrics import add_device_transfers
from kvtier.vllm.spec import KVTierConnectorSpec
from kvtier.vllm.worker import KVTierWorker

try:
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, base
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingConnectorMetadata,
        TransferJob,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )
except ImportError as error:
    raise compat.refusal(error) from error

if TYPE_CHECKING:
    import torch
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
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import GPULoadStoreSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["KVTierConnector"]

logger = logging.getLogger(f"vllm.{__name__}")  # below the one logger vLLM configures

_TAKES_NAMES: Final = hasattr(base, "KVConnectorTransferResults")
"""Whether this vLLM takes the names of requests whose load failed; before, only blocks."""


@dataclass(frozen=True, slots=True)
class _Load:
    """A load that a worker was told to do: whose, into what, and when."""

    req_id: str
    blocks: frozenset[int]
    in_step: bool


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
        compat.require_supported_vllm(type(self))
        compat.require_members(OffloadingConnectorMetadata, "load_jobs", "store_jobs")
        compat.require_members(TransferJob, "req_id", "src_spec", "dst_spec")
        super().__init__(_with_spec(vllm_config, kv_cache_config), role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            compat.require_members(self.connector_scheduler, "manager")
        else:
            compat.require_members(self.connector_worker, "worker")
        self._one_group = len(kv_cache_config.kv_cache_groups) == 1
        if not (self._one_group or _TAKES_NAMES):
            raise UnsupportedError(
                "before vLLM 0.30 a load that fails can be reported only for models with one "
                "KV cache group: use what `kvtier vllm-args --door spec` prints"
            )
        transfer = vllm_config.kv_transfer_config
        settings = _settings(transfer.kv_connector_extra_config)
        self._wants_layers = settings.transfer.load_mode == "layerwise"
        self._timeout_s = settings.transfer.load_timeout_s
        self._recomputes = transfer.kv_load_failure_policy != "fail"
        self._loading: dict[int, _Load] = {}
        self._failed_requests: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._spoiled: set[str] = set()
        self._in_step: InStepLoads | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._open_scheduler(vllm_config, kv_cache_config)

    def _open_scheduler(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        if not self._recomputes:
            logger.warning(
                "kv_load_failure_policy is fail, vLLM's default: a request whose chunks cannot "
                "be loaded ends with an error; with recompute it is computed instead"
            )
        manager = self.connector_scheduler.manager
        if not (self._wants_layers and isinstance(manager, KVTierManager)):
            return
        half = self.connector_scheduler
        reason = why_not_in_step(vllm_config, kv_cache_config, half)
        if reason:
            logger.warning(
                "transfer.load_mode: layerwise is not possible, so ahead: %s", reason
            )
        else:
            self._in_step = InStepLoads(half, manager)

    # -- scheduler half ------------------------------------------------------------------------

    @override
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how much can be loaded, and whether that is done before the request runs."""
        loads = self._in_step
        if loads is not None and loads.fills_blocks_of(request, num_computed_tokens):
            return None, False
        tokens: int | None
        tokens, ahead = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if loads is not None and tokens and ahead:
            now = loads.offer(request, num_computed_tokens, tokens)
            tokens, ahead = (now, False) if now else (tokens, ahead)
        return tokens, ahead

    @override
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load into the blocks that a request got."""
        loads = self._in_step
        unhashed = loads.take(request, blocks) if loads and num_external_tokens else None
        super().update_state_after_alloc(request, unhashed or blocks, num_external_tokens)
        if loads is not None and unhashed is not None:
            loads.planned(request, blocks)

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return what the workers are to do, and note how much is computed meanwhile."""
        manager = self.connector_scheduler.manager
        if isinstance(manager, KVTierManager):
            manager.computing(prompt_tokens(scheduler_output.num_scheduled_tokens.values()))
        if self._in_step is None:
            return super().build_connector_meta(scheduler_output)
        self._in_step.hide()
        metadata = super().build_connector_meta(scheduler_output)
        self._in_step.show()
        return metadata

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers did into account."""
        if self._in_step is not None and connector_output.invalid_block_ids:
            self._in_step.unhash(connector_output.invalid_block_ids, self._kv_cache_manager)
        super().update_connector_output(connector_output)
        if self._in_step is not None:
            self._in_step.forget_ended()

    @override
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what changed since the last call, in vLLM's names and in kvtier's."""
        stats = super().get_kv_connector_stats()
        if isinstance(stats, OffloadingConnectorStats):
            add_device_transfers(stats)
        return stats

    # -- worker half ---------------------------------------------------------------------------

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's KV memory."""
        super().register_kv_caches(kv_caches)
        worker = self._worker
        if worker is not None and self._wants_layers and self._one_group:
            (group,) = self._kv_cache_config.kv_cache_groups
            worker.open_steps(group.layer_names, timeout_s=self._timeout_s)

    @override
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Start the stores of the step before, and wait for those that must end now."""
        self._spoil(kv_connector_metadata)
        super().handle_preemptions(kv_connector_metadata)

    @override
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start this step's loads, and remember whose they are."""
        for job_id, job in self._connector_metadata.load_jobs.items():
            blocks: GPULoadStoreSpec = job.dst_spec
            self._loading[job_id] = _Load(
                job.req_id, frozenset(map(int, blocks.block_ids)), job.src_spec.in_step
            )
        super().start_load_kv(forward_context, **kwargs)
        if self._stepping is not None:
            self._stepping.start_step()

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Block until the model may read a layer, or waited for it in vain."""
        if self._stepping is not None:
            self._stepping.wait_for_layer(layer_name)

    @override
    def has_connector_metadata(self) -> bool:
        """Say whether the model is to stop before and after each layer.

        vLLM asks for nothing else, once a layer, and its two calls would find nothing to do.
        """
        return self._wants_layers and super().has_connector_metadata()

    @override
    def wait_for_save(self) -> None:
        """End the loads within the step, and keep what it computed until the next one."""
        if self._stepping is not None:
            failed = self._stepping.end_step()
            self._spoiled.update(self._loading[job_id].req_id for job_id in failed)
        self._spoil(self._connector_metadata)
        super().wait_for_save()

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return requests whose transfers are over, well or not."""
        sent, received = super().get_finished(finished_req_ids)
        if received and self._worker is not None:
            # Nobody waits for a load within the step: its request is in the batch already.
            received -= self._note_ended(self._worker)
        # Computed again from the next step on; or else it ends, and is offered once more.
        self._spoiled -= self._spoiled if self._recomputes else finished_req_ids
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

    @property
    def _worker(self) -> KVTierWorker | None:
        worker = self.connector_worker.worker
        return worker if isinstance(worker, KVTierWorker) else None

    @property
    def _stepping(self) -> KVTierWorker | None:
        """The worker, if it is to load within the forward pass."""
        return self._worker if self._wants_layers else None

    def _spoil(self, metadata: KVConnectorMetadata) -> None:
        """Keep what was computed from KV that did not arrive from being stored."""
        if self._spoiled and self._stepping is not None:
            jobs = metadata.store_jobs.items()
            self._stepping.spoil(job_id for job_id, job in jobs if job.req_id in self._spoiled)

    def _note_ended(self, worker: KVTierWorker) -> set[str]:
        """Note which loads failed; return the requests of those within the step."""
        in_step: set[str] = set()
        for job_id, ended in worker.take_ended_loads().items():
            load = self._loading.pop(job_id)
            if load.in_step:
                in_step.add(load.req_id)
            if ended.is_whole:
                continue
            logger.warning("the load of request %s failed: %s", load.req_id, ended.error)
            if not self._one_group:
                self._failed_requests.add(load.req_id)
            else:
                lost = load.blocks if ended.lost_blocks is None else ended.lost_blocks
                self._failed_blocks |= lost
        return in_step

    # -- front end -----------------------------------------------------------------------------

    @classmethod
    @override
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether the model must stop before each layer, also in CUDA graphs."""
        # vLLM asks before it builds the spec, which says so if there is no file.
        has_file = bool(extra_config.get("kvtier_config"))
        return has_file and _settings(extra_config).transfer.load_mode == "layerwise"

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


def _settings(extra_config: Mapping[str, Any]) -> KvtierConfig:
    """Return kvtier's own file."""
    return load_config(extra_config["kvtier_config"])


def _with_spec(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None = None
) -> VllmConfig:
    """Return a copy of ``vllm_config`` that names the spec of this door, and tells it more."""
    transfer = copy.copy(vllm_config.kv_transfer_config)
    transfer.kv_connector_extra_config = {
        **transfer.kv_connector_extra_config,
        "spec_name": KVTierConnectorSpec.__name__,
        "spec_module_path": KVTierConnectorSpec.__module__,
    }
    if kv_cache_config is not None:
        groups = compat.full_attention_groups(kv_cache_config)
        transfer.kv_connector_extra_config[compat.FULL_GROUPS] = groups
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = transfer
    return changed
