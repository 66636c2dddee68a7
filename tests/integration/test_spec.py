"""The adapter for vLLM's OffloadingConnector by itself: real memory, store and threads."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
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

from kvtier.connector.device import DeviceEngine
from kvtier.errors import CacheLockedError, ConfigError, KvtierError, UnsupportedError
from kvtier.keys import make_key
from kvtier.vllm import KVTierOffloadingSpec
from kvtier.vllm import spec as spec_module
from tests.unit.vllm_modules import model_settings

BLOCKS = 24
PAGE_NBYTES = 4096
LAYERS = ("layer.0", "layer.1")
CHUNK_NBYTES = PAGE_NBYTES * len(LAYERS)
NUMBERS = itertools.count()
DEADLINE_S = 60.0
COMMON: dict[str, Any] = {
    "block_size": 32,
    "num_kv_heads": 1,
    "head_size": 16,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**COMMON)

T = TypeVar("T")
Open = Callable[..., "Engine"]


def offloading_config(path: Path, **changes: Any) -> OffloadingConfig:
    """Return what vLLM gives an offloading spec."""
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
        "groups": (OffloadingGroupConfig(32, LAYERS, 0),),
        "worker_kv_bytes_per_block": CHUNK_NBYTES,
        "enable_kv_cache_events": True,
        "extra_config": {"kvtier_config": str(path)},
        "engine_id": f"spec-{os.getpid()}-{next(NUMBERS)}",
        "model": OffloadingModelConfig("some/model", "float32"),
        "cache": OffloadingCacheConfig(32, 1),
        "kv_cache_layout": "LBHNC",
    }
    fields.update(changes)
    return OffloadingConfig(parallel=OffloadingParallelConfig(**parallel), **fields)


def vllm_config(kept: KVCacheSpec = FULL, lora_config: object = None) -> SimpleNamespace:
    """Return vLLM's configuration of a worker."""
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    layers = {
        name: SimpleNamespace(
            get_attn_backend=lambda: backend,
            kv_cache_dtype="auto",
            get_kv_cache_spec=lambda _: kept,
        )
        for name in LAYERS
    }
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        **vars(model_settings({"dtype": torch.float32})),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
        lora_config=lora_config,
    )


class Engine:
    """The spec's manager and worker, and a KV memory whose blocks name themselves."""

    def __init__(self, config: OffloadingConfig, worker_config: SimpleNamespace) -> None:
        self.tensors = [torch.zeros((BLOCKS, PAGE_NBYTES), dtype=torch.int8) for _ in LAYERS]
        caches = CanonicalKVCaches(
            tensors=[CanonicalKVCacheTensor(tensor, PAGE_NBYTES) for tensor in self.tensors],
            group_data_refs=[[CanonicalKVCacheRef(at, PAGE_NBYTES) for at in range(2)]],
        )
        spec = KVTierOffloadingSpec(config)
        with pytest.MonkeyPatch.context() as patch:
            # As while vLLM's worker registers its KV memory.
            patch.setattr(spec_module, "get_current_vllm_config_or_none", lambda: worker_config)
            self.worker = spec.get_worker(caches)
        try:
            self.manager = spec.get_manager()
        except BaseException:
            self.worker.shutdown()
            raise
        self.jobs = itertools.count()
        self.requests = itertools.count()

    def request(self, req_id: str | None = None) -> ReqContext:
        context = ReqContext(req_id or f"request-{next(self.requests)}", None)
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

    def finish(self, job_id: int) -> bool:
        self.worker.wait({job_id})
        (result,) = self.worker.get_finished()
        assert result.job_id == job_id
        return bool(result.success)

    def store(self, keys: list[bytes], context: ReqContext | None = None) -> int:
        """Store block 0 and the next ones as ``keys``; return how many were taken."""
        own = context or self.request()
        plan = self.until(lambda: self.manager.prepare_store(keys, own))
        taken = len(plan.keys_to_store)
        if taken:
            job_id = next(self.jobs)
            source = GPULoadStoreSpec(list(range(taken)), [taken], [0])
            assert self.worker.submit_store(job_id, source, plan.store_spec)
            assert self.finish(job_id)
            self.manager.complete_store(set(plan.keys_to_store), own)
        self.step()
        if context is None:
            self.manager.on_request_finished(own)
        return taken

    def load(self, keys: list[bytes], blocks: list[int]) -> int:
        """Look up and load as vLLM does; return how many chunks were loaded."""
        context = self.request()
        hits = self.until(lambda: self.lookup(keys, context))
        if hits:
            plan = self.manager.prepare_load(keys[:hits], context)
            job_id = next(self.jobs)
            target = GPULoadStoreSpec(blocks[:hits], [hits], [0])
            assert self.worker.submit_load(job_id, plan, target)
            assert self.finish(job_id)
            self.manager.complete_load(set(keys[:hits]), context)
        self.manager.on_request_finished(context)
        return hits

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

    def step(self, *started: str) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(started, ()))

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

    def close(self) -> None:
        self.manager.shutdown()
        self.worker.shutdown()


def keys_of(first: int, count: int) -> list[bytes]:
    return [make_key(number.to_bytes(32, "big"), 0) for number in range(first, first + count)]


def fill_and_store(engine: Engine, first: int, count: int) -> list[bytes]:
    for block in range(count):
        engine.fill(block, first + block)
    engine.settle()  # a test steps faster than any disk
    assert engine.store(keys_of(first, count)) == count
    return keys_of(first, count)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvtier.yaml"
    path.write_text(
        f"tiers:\n- kind: ram\n  capacity: {8 * CHUNK_NBYTES}B\n"
        f"- kind: nvme\n  path: {tmp_path / 'store'}\n  capacity: {64 * CHUNK_NBYTES}B\n"
        "  own_process: false\n"
        "  on_mismatch: remove\n"
    )
    return path


@pytest.fixture
def start(file: Path) -> Iterator[Open]:
    engines: list[Engine] = []

    def start(worker_config: SimpleNamespace | None = None, **changes: Any) -> Engine:
        config = offloading_config(file, **changes)
        engines.append(Engine(config, worker_config or vllm_config()))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def test_a_chunk_comes_back_from_ram_from_nvme_and_after_a_restart(start: Open) -> None:
    engine = start()
    first = fill_and_store(engine, 10, 6)
    assert engine.load(first[:4], [20, 21, 22, 23]) == 4
    last = fill_and_store(engine, 30, 6)  # so most of the others are on NVMe only
    assert engine.load(first[:4], [20, 21, 22, 23]) == 4
    assert all(engine.holds(20 + at, 10 + at) for at in range(4))
    engine.settle()
    engine.close()
    again = start()
    assert again.load(last[:4], [20, 21, 22, 23]) == 4
    assert all(again.holds(20 + at, 30 + at) for at in range(4))


def test_after_a_reset_nothing_old_is_found(start: Open) -> None:
    engine = start()
    keys = fill_and_store(engine, 10, 4)
    engine.manager.reset_cache()
    assert engine.load(keys, [20, 21, 22, 23]) == 0


def test_a_store_whose_worker_failed_is_a_miss_although_it_was_acknowledged(
    start: Open,
) -> None:
    engine = start()
    context = engine.request()
    (key,) = keys_of(1, 1)
    plan = engine.manager.prepare_store([key], context)
    outside = GPULoadStoreSpec([BLOCKS + 3], [1], [0])
    assert engine.worker.submit_store(0, outside, plan.store_spec)
    assert engine.finish(0)
    engine.manager.complete_store({key}, context)
    assert engine.manager.lookup(key, context) is LookupResult.MISS


def test_a_load_of_other_bytes_is_never_reported_as_a_success(start: Open) -> None:
    engine = start()
    keys = fill_and_store(engine, 10, 1)
    context = engine.request()
    assert engine.lookup(keys, context) == 1
    plan = engine.manager.prepare_load(keys, context)
    plan.generations = [generation + 1 for generation in plan.generations]
    assert engine.worker.submit_load(7, plan, GPULoadStoreSpec([3], [1], [0]))
    assert not engine.finish(7)


def test_a_request_that_is_new_twice_stores_nothing_more(start: Open) -> None:
    """vLLM takes the blocks of a continued prompt for others than they are."""
    engine = start()
    context = engine.request("streamed")
    engine.step("streamed")
    assert engine.store(keys_of(10, 1), context) == 1
    engine.step("streamed")
    assert engine.store(keys_of(20, 1), context) == 0


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"pp_size": 2, "world_size": 2}, UnsupportedError, "tensor parallelism only"),
        ({"canonical_layout": True}, UnsupportedError, "canonical_layout"),
        ({"kv_cache_layout": "LHBNC"}, UnsupportedError, "KV_CACHE_LAYOUT=LBHNC"),
        ({"worker_kv_bytes_per_block": 0}, UnsupportedError, "no KV cache"),
        ({"cache": OffloadingCacheConfig(32, 2)}, ConfigError, "kvtier vllm-args"),
        ({"extra_config": {}}, ConfigError, "kvtier_config"),
        ({"worker_kv_bytes_per_block": 1 << 30}, ConfigError, "smaller than one chunk"),
        (
            {"groups": tuple(OffloadingGroupConfig(32, (LAYERS[at],), at) for at in (0, 1))},
            UnsupportedError,
            "2 KV cache groups.*use KVTierConnector",
        ),
        ({"data_parallel_size": 2}, ConfigError, r"write .*/store/{data_parallel_rank}"),
    ],
)
def test_an_engine_that_the_spec_does_not_serve_is_refused_at_start(
    file: Path, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        KVTierOffloadingSpec(offloading_config(file, **changes))


@pytest.mark.parametrize(
    ("worker_config", "says"),
    [
        (vllm_config(lora_config=object()), "LoRA adapter.*use KVTierConnector"),
        (
            vllm_config(SlidingWindowSpec(**COMMON, sliding_window=40)),
            "layer.0 keeps SlidingWindowSpec.*use KVTierConnector",
        ),
    ],
    ids=["adapters", "window"],
)
def test_an_engine_whose_kv_vllm_mixes_up_is_refused(
    start: Open, worker_config: SimpleNamespace, says: str
) -> None:
    with pytest.raises(UnsupportedError, match=says):
        start(worker_config)


def test_the_start_warns_of_resets_that_end_the_engine(
    start: Open, caplog: pytest.LogCaptureFixture
) -> None:
    start()
    warning = "so does a reset with reset_running_requests while a request loads"
    assert [warning in record.getMessage() for record in caplog.records].count(True) == 1


def test_a_worker_that_cannot_shut_down_lets_its_engine_go_on(
    start: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine in one process shuts its manager down, which unlocks the cache, next."""
    engine = start()

    def fail(_: object) -> NoReturn:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(DeviceEngine, "close", fail)
        engine.worker.shutdown()
    assert "a worker's memory may not be freed" in caplog.text


def test_a_second_engine_on_the_store_is_refused_with_the_holders_pid(start: Open) -> None:
    start()
    with pytest.raises(CacheLockedError, match=f"pid {os.getpid()}"):
        start()


def test_a_store_of_another_model_is_another_one(start: Open) -> None:
    engine = start()
    keys = fill_and_store(engine, 50, 4)
    engine.close()
    other = start(model=OffloadingModelConfig("other/model", "float32"))
    assert other.load(keys, list(range(4))) == 0


def test_a_broken_file_is_refused_with_its_place(file: Path) -> None:
    file.write_text(file.read_text() + "placment:\n  write: through\n")
    with pytest.raises(KvtierError, match=r"kvtier\.yaml:\d+.*did you mean"):
        KVTierOffloadingSpec(offloading_config(file))
