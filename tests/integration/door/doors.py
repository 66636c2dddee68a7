"""The door into vLLM by itself: real memory, real store, real threads, no engine."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvtier.connector.report.statistics import TierFigures
from kvtier.keys import make_key
from kvtier.vllm import KVTierOffloadingSpec
from tests.unit.vllm_modules import model_settings

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

BLOCKS = 24
PAGE_NBYTES = 4096
LAYERS = 2
CHUNK_NBYTES = PAGE_NBYTES * LAYERS
NUMBERS = itertools.count()
DEADLINE_S = 60.0

T = TypeVar("T")
Settings = Callable[..., Path]
OpenDoor = Callable[..., "Door"]


def offloading_config(path: Path, **changes: Any) -> OffloadingConfig:
    parallel: dict[str, Any] = {
        "rank": 0,
        "world_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "data_parallel_index": 0,
        "data_parallel_size": 1,
        "data_parallel_rank_local": None,
        "is_parallelism_agnostic": False,
    }
    parallel.update({key: changes.pop(key) for key in list(changes) if key in parallel})
    fields: dict[str, Any] = {
        "groups": (OffloadingGroupConfig(32, ("layer.0", "layer.1"), 0),),
        "worker_kv_bytes_per_block": CHUNK_NBYTES,
        "enable_kv_cache_events": True,
        "extra_config": {"kvtier_config": str(path)},
        "engine_id": f"door-{os.getpid()}-{next(NUMBERS)}",
        "model": OffloadingModelConfig("some/model", "float32"),
        "cache": OffloadingCacheConfig(32, 1),
        "kv_cache_layout": "LBHNC",
    }
    fields.update(changes)
    return OffloadingConfig(parallel=OffloadingParallelConfig(**parallel), **fields)


def model(
    held: Sequence[str],
    settings: Mapping[str, Any] = MappingProxyType({}),
    lora_config: object = None,
) -> SimpleNamespace:
    """Return vLLM's configuration of a model whose layers hold elements of these types."""
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    layers = {
        f"layer.{number}": SimpleNamespace(
            get_attn_backend=lambda: backend, kv_cache_dtype=element
        )
        for number, element in enumerate(held)
    }
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        **vars(model_settings({"dtype": torch.float32, **settings})),
        cache_config=SimpleNamespace(),
        lora_config=lora_config,
    )


class Door:
    """Both halves of one engine, and a KV memory whose blocks name themselves."""

    def __init__(
        self,
        config: OffloadingConfig,
        kind: type[KVTierOffloadingSpec] = KVTierOffloadingSpec,
        held: Sequence[str] = ("auto",) * LAYERS,
        run_as: Mapping[str, Any] = MappingProxyType({}),
        lora_config: object = None,
    ) -> None:
        self.tensors = [
            torch.zeros((BLOCKS, PAGE_NBYTES), dtype=torch.int8) for _ in range(LAYERS)
        ]
        caches = CanonicalKVCaches(
            tensors=[CanonicalKVCacheTensor(tensor, PAGE_NBYTES) for tensor in self.tensors],
            group_data_refs=[[CanonicalKVCacheRef(i, PAGE_NBYTES) for i in range(LAYERS)]],
        )
        spec = kind(config)
        with pytest.MonkeyPatch.context() as patch:
            # As while vLLM's worker registers its KV memory.
            own = model(held, run_as, lora_config)
            patch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: own)
            self.worker = spec.get_worker(caches)
        assert spec.get_worker(caches) is self.worker
        try:
            self.manager = spec.get_manager()
        except BaseException:
            self.worker.shutdown()
            raise
        self.jobs = itertools.count()
        self.requests = itertools.count()

    def request(self, hints: dict[str, Any] | None = None) -> ReqContext:
        params = None if hints is None else {"kvtier": hints}
        context = ReqContext(f"request-{next(self.requests)}", params)
        self.manager.on_new_request(context)
        return context

    def fill(self, block: int, content: int) -> None:
        for layer, tensor in enumerate(self.tensors):
            tensor[block] = content + layer

    def holds(self, block: int, content: int) -> bool:
        return all(
            bool((tensor[block] == content + layer).all())
            for layer, tensor in enumerate(self.tensors)
        )

    def finish(self, job_id: int) -> None:
        self.worker.wait({job_id})
        (result,) = self.worker.get_finished()
        assert result.job_id == job_id
        assert result.success

    def store(
        self, keys: list[bytes], blocks: list[int], hints: dict[str, Any] | None = None
    ) -> int:
        """Store as the connector does; returns how many chunks were taken."""
        context = self.request(hints)
        plan = self.until(lambda: self.manager.prepare_store(keys, context))
        taken = len(plan.keys_to_store)
        if taken:
            job_id = next(self.jobs)
            source = GPULoadStoreSpec(blocks[:taken], [taken], [0])
            assert self.worker.submit_store(job_id, source, plan.store_spec)
            self.finish(job_id)
            self.manager.complete_store(set(plan.keys_to_store), context)
        self.step()
        self.manager.on_request_finished(context)
        return taken

    def load(self, keys: list[bytes], blocks: list[int]) -> list[CacheHitSource]:
        """Look up and load as the connector does; returns where each chunk came from."""
        context = self.request()
        hits = self.until(lambda: self.lookup(keys, context))
        if not hits:
            self.manager.on_request_finished(context)
            return []
        chunks = keys[:hits]
        spec = self.manager.prepare_load(chunks, context)
        sources = [self.manager.get_load_source(key, context) for key in chunks]
        job_id = next(self.jobs)
        assert self.worker.submit_load(
            job_id, spec, GPULoadStoreSpec(blocks[:hits], [hits], [0])
        )
        self.finish(job_id)
        self.manager.complete_load(set(chunks), context)
        self.manager.on_request_finished(context)
        return sources

    def lookup(self, keys: list[bytes], context: ReqContext) -> int | None:
        hits, deferred = 0, False
        for key in keys:
            match self.manager.lookup(key, context):
                case LookupResult.MISS:
                    break
                case LookupResult.HIT:
                    hits += 1
                case _:
                    deferred = True
        return None if deferred else hits

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def until(self, ask: Callable[[], T | None]) -> T:
        deadline = time.monotonic() + DEADLINE_S
        while (answer := ask()) is None:
            self.step()
            assert time.monotonic() < deadline
        return answer

    def settle(self) -> None:
        """Step until every demotion has arrived."""
        deadline = time.monotonic() + DEADLINE_S
        while self.manager.has_pending_work():
            self.step()
            assert time.monotonic() < deadline

    def figures(self, tier: int) -> TierFigures:
        figures: TierFigures = self.manager.statistics().tiers[tier]
        return figures

    def close(self) -> None:
        self.manager.shutdown()
        self.manager.shutdown()
        self.worker.shutdown()
        self.worker.shutdown()


def key(number: int) -> bytes:
    return make_key(number.to_bytes(32, "big"), 0)


def fill_and_store(door: Door, first: int, count: int) -> list[bytes]:
    keys = [key(number) for number in range(first, first + count)]
    for block in range(count):
        door.fill(block, first + block)
    door.settle()  # a test steps faster than any disk
    assert door.store(keys, list(range(count))) == count
    return keys
