"""The recommended door: vLLM's OffloadingConnector, plus the means to say that a load failed.

vLLM's scheduler half and worker half do what they always do, and are not asked where nothing
would come of it (:mod:`kvtier.vllm.shortcuts`). What is added is in the worker: a job that did
not work is acknowledged like any other, so nothing in vLLM's half asserts on it, and vLLM's
scheduler is told what did not arrive: it computes that (``kv_load_failure_policy: recompute``)
or fails the request alone (``fail``). With one KV cache group of full attention it is told the
blocks, so what came before the first bad one is kept. With several a block's number does not
say whose it is; and of a window, or of a state, only the end was to be loaded, so before a bad
block there is nothing to go on from. There the request is named, which vLLM knows since 0.30,
and computed from its start.

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
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvtier.config import KvtierConfig, load_config
from kvtier.errors import UnsupportedError
from kvtier.logs import get_logger
from kvtier.manager.estimates import prompt_tokens
from kvtier.vllm import compat
from kvtier.vllm.adapters import AdapterContents
from kvtier.vllm.connector_contract import (
    KVConnectorRole,
    OffloadingConnector,
    OffloadingConnectorMetadata,
    TransferJob,
    TransferResults,
)
from kvtier.vllm.contract import OffloadingConnectorStats
from kvtier.vllm.corrections import Corrections, late_stores_refused
from kvtier.vllm.in_step import InStepLoads, why_not_in_step
from kvtier.vllm.late_flushes import LateFlushes, overwritten_stores
from kvtier.vllm.manager import KVTierManager
from kvtier.vllm.metrics import LoggedStats, add_device_transfers, latest_of_front_ends
from kvtier.vllm.recomputed import RecomputedChunks
from kvtier.vllm.shortcuts import BusyRequests
from kvtier.vllm.spec import KVTierConnectorSpec
from kvtier.vllm.worker import KVTierWorker
from kvtier.vllm.worker_loads import WorkerLoads

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
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
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["KVTierConnector"]

logger = get_logger(__name__)


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

    _adapters: AdapterContents | None = None
    _recomputed: RecomputedChunks | None = None

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        compat.require_supported_vllm(type(self))
        compat.require_members(OffloadingConnectorMetadata, "load_jobs", "store_jobs")
        compat.require_members(TransferJob, "req_id", "src_spec", "dst_spec")
        compat.require_known_groups(kv_cache_config)
        super().__init__(_with_spec(vllm_config, kv_cache_config), role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            compat.require_members(self.connector_scheduler, "manager")
        else:
            compat.require_members(self.connector_worker, "worker")
        self._names_blocks = _names_blocks(kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._transfer = _settings(transfer.kv_connector_extra_config).transfer
        self._wants_layers = self._transfer.load_mode == "layerwise"
        self._recomputes = transfer.kv_load_failure_policy != "fail"
        self._loads = WorkerLoads(names_blocks=self._names_blocks, recomputes=self._recomputes)
        self._skips = compat.source_was_read()
        events = vllm_config.kv_events_config
        self._listens = events is not None and events.enable_kv_cache_events
        self._has_deferred = False
        self._stepping: KVTierWorker | None = None
        """The worker, if it is to load within the forward pass."""
        self._planned: set[str] = set()
        """Requests with a load in the step that is being scheduled."""
        self._kvtier: KVTierManager | None = None
        self._busy: BusyRequests | None = None
        self._in_step: InStepLoads | None = None
        self._corrections: Corrections | None = None
        self._late: LateFlushes | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._open_scheduler(vllm_config, kv_cache_config)

    def _open_scheduler(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        if not self._recomputes:
            logger.warning(
                "kv_load_failure_policy is fail, vLLM's default: a request whose chunks cannot "
                "be loaded ends with an error; with recompute it is computed instead"
            )
        half = self.connector_scheduler
        manager = half.manager
        _require_no_late_stores(half, vllm_config, kv_cache_config)
        astray = compat.parts_go_astray(vllm_config, kv_cache_config)
        self._corrections = Corrections(half, parts_go_astray=astray)
        moving = compat.moving_states(kv_cache_config)
        comes_late = compat.writes_to_blocks_first(vllm_config, kv_cache_config)
        self._late = LateFlushes(half, moving) if comes_late else None
        if not isinstance(manager, KVTierManager):
            return
        self._kvtier = manager
        manager.believes_tables = self._corrections.knows_tables
        if self._recomputes:
            self._recomputed = RecomputedChunks(half)
        self._adapters = AdapterContents(vllm_config.lora_config)
        if self._skips:
            self._busy = BusyRequests(half)
            logger.info("vLLM's offloading half is asked only where it has something to do")
        else:
            logger.info(
                "vLLM's offloading half is asked everything at every step, for its source is "
                "not one that kvtier knows; that costs some time and nothing else"
            )
        if not self._wants_layers:
            return
        reason = why_not_in_step(vllm_config, kv_cache_config, half)
        if reason:
            logger.warning(
                "transfer.load_mode: layerwise is not possible, so ahead: %s", reason
            )
        else:
            self._in_step = InStepLoads(half, manager)

    # -- scheduler half ------------------------------------------------------------------------

    @override
    def on_new_request(self, request: Request) -> None:
        """Note a request that arrives, and what its adapter holds if it has one."""
        adapter, manager, contents = request.lora_request, self._kvtier, self._adapters
        if adapter is None or manager is None or contents is None:
            super().on_new_request(request)
            return
        with manager.adapting(contents.of(adapter)):
            super().on_new_request(request)

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
        if self._busy is not None:
            self._busy.forget(request.request_id)
        if num_external_tokens:
            self._planned.add(request.request_id)
        elif self._corrections is not None:
            self._corrections.note_blocks(request, blocks)
        super().update_state_after_alloc(request, unhashed or blocks, num_external_tokens)
        if self._recomputed is not None and num_external_tokens:
            self._recomputed.planned(request, blocks)
        if loads is not None and unhashed is not None:
            loads.planned(request, blocks)

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return what the workers are to do, and note how much is computed meanwhile."""
        if self._kvtier is not None:
            tokens = scheduler_output.num_scheduled_tokens
            generates = scheduler_output.total_num_scheduled_tokens == len(tokens)
            self._kvtier.computing(0 if generates else prompt_tokens(tokens.values()))
        busy, in_step = self._busy, self._in_step
        if busy is not None and self._rests and busy.is_quiet(scheduler_output):
            return busy.nothing()
        if in_step is not None:
            in_step.end_offers()
        self._show_again(self._recomputed.go_back() if self._recomputed else ())
        output = self._corrected(scheduler_output)
        shown = output if busy is None else busy.of(output)
        if busy is not None and shown is None:
            return busy.pass_over()
        if in_step is not None:
            in_step.hide()
        metadata = super().build_connector_meta(shown)
        if in_step is not None:
            in_step.show()
        if busy is not None:
            busy.looked_at(shown)
        return metadata if self._late is None else self._late.told(metadata, output)

    @property
    def _rests(self) -> bool:
        """Whether a step that means nothing to vLLM's half means nothing to anybody."""
        manager, corrections, recomputed = self._kvtier, self._corrections, self._recomputed
        return (
            manager is not None
            and manager.rests
            and self._in_step is None
            and (corrections is None or corrections.is_idle)
            and (recomputed is None or not recomputed.is_waiting)
        )

    def _corrected(self, output: SchedulerOutput) -> SchedulerOutput:
        """Return a step as vLLM's half is to see it: without those who came back in it.

        These are preempted requests that load in the same step: vLLM preempts all that run when
        its prefix cache is reset by force, and lets them in again at once. Such a request has
        no stores in flight, or it would not load yet, and these are all that the half looks
        for; it asserts that it finds no load.
        """
        corrections = self._corrections
        if corrections is not None:
            corrections.forget_told(output)
            output = corrections.completed(output)
            corrections.strike_out_given(output)
        if not self._planned:
            return output
        loading, self._planned = self._planned, set()
        preempted = output.preempted_req_ids or set()
        if loading.isdisjoint(preempted):
            return output
        shown = copy.copy(output)
        shown.preempted_req_ids = preempted - loading
        return shown

    @override
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers did into account."""
        if self._in_step is not None and connector_output.invalid_block_ids:
            self._in_step.unhash(connector_output.invalid_block_ids, self._kv_cache_manager)
        if self._recomputed is not None:
            self._show_again(self._recomputed.note_failed(connector_output))
        if not (self._skips and connector_output.kv_connector_worker_meta is None):
            super().update_connector_output(connector_output)
        if self._in_step is not None:
            self._in_step.forget_ended()

    def _show_again(self, req_ids: Iterable[str]) -> None:
        """Show requests to vLLM's half that has to offer more of them than it thought."""
        for req_id in req_ids:
            if self._busy is not None:
                self._busy.forget(req_id)

    @override
    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note that a request ended, and how far it got."""
        if self._corrections is not None:
            self._corrections.bound_last_stores(request)
            self._corrections.strike_out_lost(request, (block_ids,))
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished(
            request, block_ids
        )
        return answer

    @override
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do so for a model with several KV cache groups."""
        if self._corrections is not None:
            self._corrections.bound_last_stores(request)
            self._corrections.strike_out_lost(request, block_ids)
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(
            request, block_ids
        )
        return answer

    @override
    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return what became resident or ceased to be."""
        if not self._listens:
            return ()
        before = () if self._corrections is None else self._corrections.take_events()
        return chain(before, super().take_events())

    @override
    def has_pending_push_work(self) -> bool:
        """Whether the engine must keep stepping while no request runs."""
        if self._corrections is not None and self._corrections.has_events:
            return True
        pending: bool = super().has_pending_push_work()
        return pending

    @override
    def reset_cache(self) -> bool | None:
        """Make everything in every tier a miss; a success only if a restart finds it so too."""
        if self._busy is not None:
            self._busy.clear()
        if self._recomputed is not None:
            self._recomputed.clear()
        reset = super().reset_cache
        answer = reset() if self._corrections is None else self._corrections.reset(reset)
        return False if self._kvtier is not None and self._kvtier.owes_reset else answer

    @override
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return what changed since the last call, in vLLM's names and in kvtier's."""
        if self.connector_scheduler is None:
            return None
        manager = self._kvtier
        if manager is not None:
            manager.computed()
            if self._skips and not manager.has_stats():
                return None  # the half keeps its own figures until then
        stats = super().get_kv_connector_stats()
        if isinstance(stats, OffloadingConnectorStats):
            add_device_transfers(stats)
        return stats

    # -- worker half ---------------------------------------------------------------------------

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's KV memory."""
        super().register_kv_caches(kv_caches)
        if not self._wants_layers:
            return
        self._stepping = worker = self._worker
        if worker is not None and self._names_blocks:
            (group,) = self._kv_cache_config.kv_cache_groups
            worker.open_steps(group.layer_names, timeout_s=self._transfer.load_timeout_s)

    @override
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Start the stores of the step before, and wait for those that must end now."""
        if self._stepping is not None:
            self._loads.spoil_stores(kv_connector_metadata, self._stepping)
        overwritten = overwritten_stores(kv_connector_metadata)
        if overwritten and self._worker is not None:
            self._worker.give_up(overwritten)
        if self._skips and not (self._has_deferred or kv_connector_metadata.jobs_to_flush):
            return
        super().handle_preemptions(kv_connector_metadata)
        self._has_deferred = False

    @override
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start this step's loads, and remember whose they are."""
        metadata = self._connector_metadata
        if not self._skips or self._has_deferred or metadata.load_jobs:
            self._loads.begin(metadata)
            super().start_load_kv(forward_context, **kwargs)
            self._has_deferred = False
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
        metadata = self._connector_metadata
        if self._stepping is not None:
            self._loads.spoil(self._stepping.end_step())
            self._loads.spoil_stores(metadata, self._stepping)
        if not self._skips or metadata.store_jobs:
            super().wait_for_save()
            self._has_deferred = True

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return requests whose transfers are over, well or not."""
        worker = self._worker
        self._loads.forget_spoiled(finished_req_ids)
        sent, received = super().get_finished(finished_req_ids)
        if received and worker is not None:
            received -= self._loads.end(worker)
        return sent, received

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return requests whose transfers are over, and those of them whose load failed."""
        worker = self._worker
        if self._skips and worker is not None and worker.is_idle:
            self._loads.forget_spoiled(finished_req_ids)
            return TransferResults()
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = self._loads.take_failed(results.finished_recving)
        return results

    @override
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks whose content must not be used."""
        return self._loads.take_lost_blocks()

    @property
    def _worker(self) -> KVTierWorker | None:
        worker = self.connector_worker.worker
        return worker if isinstance(worker, KVTierWorker) else None

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
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LoggedStats:
        """Return what vLLM's log shows of ``data``."""
        return LoggedStats() if data is None else LoggedStats(data=data)

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
            _with_spec(vllm_config),
            latest_of_front_ends(metric_types),
            labelnames,
            per_engine_labelvalues,
        )


def _settings(extra_config: Mapping[str, Any]) -> KvtierConfig:
    """Return kvtier's own file."""
    return load_config(extra_config["kvtier_config"])


def _names_blocks(kv_cache_config: KVCacheConfig) -> bool:
    """Return whether vLLM goes on rightly if it is told blocks that were not loaded.

    Raises:
        UnsupportedError: It does not, and cannot be told requests either.
    """
    full_groups = compat.full_attention_groups(kv_cache_config)
    names_blocks = len(kv_cache_config.kv_cache_groups) == len(full_groups) == 1
    if not (names_blocks or TransferResults):
        raise UnsupportedError(
            "before vLLM 0.30 a load that fails can be reported only for models with one KV "
            "cache group, of full attention: use what `kvtier vllm-args --door spec` prints"
        )
    return names_blocks


def _require_no_late_stores(
    half: Any,  # noqa: ANN401 - vLLM's
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
) -> None:
    """Refuse an engine whose half makes late stores and cannot be corrected."""
    if compat.blocks_can_be_struck_out(half):
        return
    kinds = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    groups = ((kind.block_size, kind) for kind in kinds)
    settings = _settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
    blocks_per_chunk = settings.engine.blocks_per_chunk
    if compat.offers_late(vllm_config, groups, blocks_per_chunk=blocks_per_chunk):
        raise late_stores_refused()


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
