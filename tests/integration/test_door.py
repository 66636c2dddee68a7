"""The door into vLLM by itself: real memory, real store, real threads, no engine."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from vllm.v1.core import kv_cache_utils
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
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier.connector import service as service_module
from kvtier.connector.report.statistics import TierFigures
from kvtier.errors import (
    CapacityError,
    ConfigError,
    KvtierError,
    StoreLockedError,
    UnsupportedError,
)
from kvtier.keys import make_key
from kvtier.memory import backing
from kvtier.types import Outcome, TransferResult
from kvtier.vllm import KVTierOffloadingSpec
from kvtier.vllm import manager as door_module
from kvtier.vllm.metrics import metric_definitions
from kvtier.vllm.spec import KVTierConnectorSpec
from kvtier.vllm.specs import SlotLoadStoreSpec

BLOCKS = 24
PAGE_NBYTES = 4096
LAYERS = 2
CHUNK_NBYTES = PAGE_NBYTES * LAYERS
NUMBERS = itertools.count()
DEADLINE_S = 20.0

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


def model(held: Sequence[str]) -> SimpleNamespace:
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
        model_config=SimpleNamespace(dtype=torch.float32),
        cache_config=SimpleNamespace(),
    )


class Door:
    """Both halves of one engine, and a KV memory whose blocks name themselves."""

    def __init__(
        self,
        config: OffloadingConfig,
        kind: type[KVTierOffloadingSpec] = KVTierOffloadingSpec,
        held: Sequence[str] = ("auto",) * LAYERS,
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
            patch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: model(held))
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


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    def write(ram: int = 8, nvme: int = 64, extra: str = "") -> Path:
        path = tmp_path / "kvtier.yaml"
        path.write_text(
            f"tiers:\n- kind: ram\n  capacity: {ram * CHUNK_NBYTES}B\n"
            f"- kind: nvme\n  path: {tmp_path / 'store'}\n"
            f"  capacity: {nvme * CHUNK_NBYTES}B\n{extra}",
            encoding="utf-8",
        )
        return path

    return write


@pytest.fixture
def open_door() -> Iterator[OpenDoor]:
    doors: list[Door] = []

    def open_one(
        path: Path,
        kind: type[KVTierOffloadingSpec] = KVTierOffloadingSpec,
        held: Sequence[str] = ("auto",) * LAYERS,
        **changes: Any,
    ) -> Door:
        door = Door(offloading_config(path, **changes), kind, held)
        doors.append(door)
        return door

    yield open_one
    for door in doors:
        door.close()


def key(number: int) -> bytes:
    return make_key(number.to_bytes(32, "big"), 0)


def fill_and_store(door: Door, first: int, count: int) -> list[bytes]:
    keys = [key(number) for number in range(first, first + count)]
    for block in range(count):
        door.fill(block, first + block)
    door.settle()  # a test steps faster than any disk
    assert door.store(keys, list(range(count))) == count
    return keys


def test_a_chunk_comes_back_from_ram_and_from_nvme_bit_for_bit(
    settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(settings(ram=4))
    first = fill_and_store(door, 10, 4)
    assert door.load(first, [20, 21, 22, 23]) == [CacheHitSource.HOST] * 4
    fill_and_store(door, 30, 4)
    door.settle()
    # RAM holds the second four now, so two of the first four fit the budget at a time.
    assert door.load(first, [12, 13, 14, 15]) == [CacheHitSource.DISK] * 2
    for block, content in zip([12, 13], [10, 11], strict=True):
        assert door.holds(block, content)
    assert door.figures(1).hit_tokens == 2 * 32
    assert door.figures(0).hit_chunks == 4


def test_a_request_says_what_of_its_chunks_to_keep_and_what_not_to_store(
    settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(settings(ram=4, extra="placement:\n  retain_quota: 50%\n"))
    assert door.store([key(1)], [0], {"retain_s": 600}) == 1
    assert door.store([key(2)], [0], {"skip_store": True}) == 0
    assert door.manager.statistics().retained_chunks == 1
    for first in range(10, 30, 2):
        fill_and_store(door, first, 2)
    assert door.load([key(1)], [3]) == [CacheHitSource.HOST]
    assert door.load([key(2)], [3]) == []


def test_a_new_engine_on_the_store_loads_what_the_old_one_stored(
    settings: Settings, open_door: OpenDoor
) -> None:
    path = settings(ram=16)
    door = open_door(path)
    keys = fill_and_store(door, 50, 8)
    door.close()
    again = open_door(path)
    assert again.load(keys, list(range(8))) == [CacheHitSource.DISK] * 8
    assert all(again.holds(block, 50 + block) for block in range(8))


def test_a_flipped_bit_on_the_disk_is_a_miss_and_the_rest_of_the_prefix_is_used(
    settings: Settings, open_door: OpenDoor, tmp_path: Path
) -> None:
    path = settings(ram=16)
    door = open_door(path)
    keys = fill_and_store(door, 50, 8)
    door.close()
    (slots,) = tmp_path.glob("store/*/slots.bin")
    data = bytearray(slots.read_bytes())
    position = data.index(bytes([55]) * PAGE_NBYTES + bytes([56]) * PAGE_NBYTES)
    data[position + 17] ^= 4
    slots.write_bytes(data)
    again = open_door(path)
    assert again.load(keys, list(range(8))) == [CacheHitSource.DISK] * 5
    assert again.figures(1).corrupt_chunks == 1
    assert again.load(keys, list(range(8))) == [CacheHitSource.HOST] * 5


def test_a_store_whose_worker_failed_is_a_miss_although_it_was_acknowledged(
    settings: Settings, open_door: OpenDoor, caplog: pytest.LogCaptureFixture
) -> None:
    door = open_door(settings())
    context = door.request()
    plan = door.manager.prepare_store([key(1)], context)
    outside = GPULoadStoreSpec([BLOCKS + 3], [1], [0])
    assert door.worker.submit_store(0, outside, plan.store_spec)
    door.finish(0)
    door.manager.complete_store({key(1)}, context)
    assert door.manager.lookup(key(1), context) is LookupResult.MISS
    assert door.figures(0).failed_writes == 1
    assert "gpu -> ram" in caplog.text


def test_a_load_that_does_not_bear_its_stamp_is_never_reported_as_a_success(
    settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(settings())
    fill_and_store(door, 10, 1)
    forged = SlotLoadStoreSpec([0], [12345])
    assert door.worker.submit_load(7, forged, GPULoadStoreSpec([3], [1], [0]))
    door.worker.wait({7})
    (result,) = door.worker.get_finished()
    assert not result.success


def test_after_a_reset_nothing_old_is_found_now_or_after_a_restart(
    settings: Settings, open_door: OpenDoor
) -> None:
    path = settings(ram=16)
    door = open_door(path)
    keys = fill_and_store(door, 50, 8)
    door.settle()
    door.manager.reset_cache()
    assert door.load(keys, list(range(8))) == []
    assert door.store(keys[:2], [0, 1]) == 2
    door.close()
    again = open_door(path)
    assert again.load(keys, list(range(8))) == [CacheHitSource.DISK] * 2


def test_a_reset_that_fails_is_loud_and_reaches_every_tier(
    settings: Settings, open_door: OpenDoor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    second = f"- kind: nvme\n  name: big\n  path: {tmp_path / 'big'}\n  capacity: 1MiB\n"
    door = open_door(settings(ram=16, extra=second))
    keys = fill_and_store(door, 50, 4)
    door.settle()
    reached: list[str] = []
    said: list[str] = []

    def failing(name: str) -> Callable[[], Awaitable[None]]:
        async def reset() -> None:
            reached.append(name)
            raise OSError(5, name)

        return reset

    for tier in door.manager._service._storage.tiers:
        monkeypatch.setattr(tier, "reset", failing(tier.name))
    monkeypatch.setattr(
        service_module.logger, "error", lambda text, *_, **__: said.append(text)
    )
    door.manager.reset_cache()
    assert reached == ["nvme", "big"]
    assert "remove the stores' directories" in said[-1]
    assert door.load(keys, list(range(4))) == []


def test_removals_are_announced_before_the_stores_that_use_their_room(
    settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(settings(ram=2))
    first = fill_and_store(door, 10, 2)
    door.settle()
    list(door.manager.take_events())
    second = fill_and_store(door, 30, 2)
    events = [event for event in door.manager.take_events() if event.medium.name == "CPU"]
    assert [(sorted(event.keys), event.removed) for event in events] == [
        (first, True),
        (second, False),
    ]


def test_every_number_that_is_reported_was_declared(
    settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(settings(ram=4))
    fill_and_store(door, 10, 4)
    fill_and_store(door, 30, 4)
    door.settle()
    stats = door.manager.get_stats()
    declared = metric_definitions()
    for name, values in stats.data["data"].items():
        for labels in values:
            assert len(labels) == len(declared[name].labelnames)
    assert stats.reduce()["kvtier_evicted_chunks:('ram',)"] == 4
    assert stats.reduce()["kvtier_kv_offload_total_bytes:('ram_to_nvme',)"] > 0
    assert door.manager.get_stats() is None


def test_hashes_seeded_at_random_are_a_warning_at_the_first_request(
    settings: Settings,
    open_door: OpenDoor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    door = open_door(settings())
    monkeypatch.setattr(kv_cache_utils, "_NONE_HASH_SEED", "drawn at random")
    warned: list[str] = []
    monkeypatch.setattr(door_module.logger, "warning", warned.append)
    door.request()
    door.request()
    assert len(warned) == 1
    assert "PYTHONHASHSEED" in warned[0]


def test_huge_pages_that_are_required_and_not_reserved_are_an_error_at_the_start(
    settings: Settings, open_door: OpenDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = settings()
    path.write_text(path.read_text().replace("kind: ram", "kind: ram\n  huge_pages: require"))
    monkeypatch.setattr(backing, "_free_huge_pages", lambda: 0)
    with pytest.raises(CapacityError, match="huge_pages to auto"):
        open_door(path)


def test_metrics_can_be_switched_off(settings: Settings, open_door: OpenDoor) -> None:
    door = open_door(settings(extra="metrics:\n  enabled: false\n"))
    assert door.manager.get_stats() is None


def test_an_unexpected_error_is_a_miss_or_a_refusal_and_is_counted(
    settings: Settings,
    open_door: OpenDoor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = open_door(settings())
    context = door.request()

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(door.manager._service._manager, "lookup", fail)
    monkeypatch.setattr(door.manager._service._manager, "prepare_store", fail)
    with caplog.at_level(logging.ERROR):
        assert door.manager.lookup(key(1), context) is LookupResult.MISS
        assert door.manager.prepare_store([key(1)], context).keys_to_store == []
    assert caplog.text.count("ZeroDivisionError: a bug") == 1
    assert door.manager.statistics().internal_errors == 2


def test_a_result_that_cannot_be_applied_does_not_take_the_others_with_it(
    settings: Settings,
    open_door: OpenDoor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = open_door(settings())
    context = door.request()
    arrived = [[TransferResult(number, [Outcome.DONE]) for number in (1, 2, 3)]]
    applied: list[int] = []

    def fail_at_first(result: TransferResult) -> None:
        applied.append(result.job_id)
        if len(applied) == 1:
            raise ZeroDivisionError("a bug")

    monkeypatch.setattr(
        door.manager._service._engine, "poll", lambda: arrived.pop() if arrived else []
    )
    monkeypatch.setattr(door.manager._service._manager, "apply", fail_at_first)
    with caplog.at_level(logging.ERROR):
        assert door.manager.lookup(key(1), context) is LookupResult.MISS
    assert applied == [1, 2, 3]
    assert door.manager.statistics().internal_errors == 1
    assert caplog.text.count("ZeroDivisionError: a bug") == 1


def test_a_second_engine_on_the_store_is_refused_with_the_holders_pid(
    settings: Settings, open_door: OpenDoor
) -> None:
    path = settings()
    open_door(path)
    with pytest.raises(StoreLockedError, match=f"pid {os.getpid()}"):
        open_door(path)


def test_a_store_of_another_model_gets_its_own_namespace(
    settings: Settings, open_door: OpenDoor, tmp_path: Path
) -> None:
    path = settings(ram=16, nvme=32)
    door = open_door(path)
    keys = fill_and_store(door, 50, 4)
    door.close()
    other = open_door(path, model=OffloadingModelConfig("other/model", "float32"))
    assert other.load(keys, list(range(4))) == []
    other.close()
    assert len(list(tmp_path.glob("store/*/slots.bin"))) in {1, 2}


def test_only_layers_of_the_same_element_types_find_what_was_stored(
    settings: Settings, open_door: OpenDoor
) -> None:
    path = settings(extra="  own_process: false\n")
    door = open_door(path, held=("fp8", "auto"))
    keys = fill_and_store(door, 50, 1)
    door.close()
    again = open_door(path, held=("fp8", "auto"))
    assert again.load(keys, [0]) == [CacheHitSource.DISK]
    again.close()
    assert open_door(path, held=("auto", "fp8")).load(keys, [0]) == []


def test_chunks_of_several_blocks_and_partial_ends(
    settings: Settings, open_door: OpenDoor
) -> None:
    path = settings(ram=64, nvme=256, extra="engine:\n  blocks_per_chunk: 4\n")
    door = open_door(path, cache=OffloadingCacheConfig(32, 4))
    for block in range(8):
        door.fill(block, 40 + block)
    context = door.request()
    plan = door.manager.prepare_store([key(1), key(2)], context)
    assert door.worker.submit_store(
        0, GPULoadStoreSpec(list(range(8)), [8], [0]), plan.store_spec
    )
    door.finish(0)
    door.manager.complete_store({key(1), key(2)}, context)
    spec = door.manager.prepare_load([key(1), key(2)], context)
    # Blocks 2 to 6 of the request: both chunks are partial.
    assert door.worker.submit_load(1, spec, GPULoadStoreSpec([10, 11, 12, 13, 14], [5], [2]))
    door.finish(1)
    assert all(door.holds(10 + i, 42 + i) for i in range(5))


def test_dirty_chunks_are_brought_down_at_shutdown_when_written_on_evict(
    settings: Settings, open_door: OpenDoor
) -> None:
    path = settings(ram=16, extra="placement:\n  write: evict\n")
    door = open_door(path)
    keys = fill_and_store(door, 50, 8)
    assert door.figures(1).stored_chunks == 0
    door.close()
    again = open_door(path)
    assert again.load(keys, list(range(8))) == [CacheHitSource.DISK] * 8


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"pp_size": 2, "world_size": 2}, UnsupportedError, "tensor parallelism only"),
        ({"canonical_layout": True}, UnsupportedError, "canonical_layout"),
        ({"worker_kv_bytes_per_block": 0}, UnsupportedError, "no KV cache"),
        ({"cache": OffloadingCacheConfig(32, 2)}, ConfigError, "kvtier vllm-args"),
        ({"extra_config": {}}, ConfigError, "kvtier_config"),
        ({"worker_kv_bytes_per_block": 1 << 30}, ConfigError, "smaller than one chunk"),
    ],
)
def test_what_kvtier_cannot_serve_is_refused_at_start(
    settings: Settings, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        KVTierOffloadingSpec(offloading_config(settings(), **changes))


def test_a_broken_file_is_refused_with_its_place(settings: Settings) -> None:
    path = settings(extra="placment:\n  write: through\n")
    with pytest.raises(KvtierError, match=r"kvtier\.yaml:\d+.*did you mean"):
        KVTierOffloadingSpec(offloading_config(path))


@dataclass(frozen=True)
class Asker:
    """A request for a prefix whose first chunk is filled with ``content``, and so on."""

    keys: list[bytes]
    content: int
    context: ReqContext


def schedule(door: Door, waiting: list[Asker], loaded: list[Asker]) -> list[Asker]:
    """Take one step as vLLM does: plan the loads of all requests, then do them at once.

    Args:
        door: The engine's halves.
        waiting: Requests that wait; those that wait no longer are taken out.
        loaded: What the step before returned: they run in this one.

    Returns:
        Requests that were loaded.
    """
    running = list(loaded)
    loads: dict[int, tuple[Asker, SlotLoadStoreSpec, range]] = {}
    used = 0
    for asker in list(waiting):
        hits = door.lookup(asker.keys, asker.context)
        if hits is None:
            continue
        waiting.remove(asker)
        if hits:
            source = door.manager.prepare_load(asker.keys[:hits], asker.context)
            loads[next(door.jobs)] = asker, source, range(used, used + hits)
            used += hits
        else:
            running.append(asker)
    names = [asker.context.req_id for asker in running]
    door.manager.on_schedule_end(ScheduleEndContext(names, ()))
    for job_id, (_, source, blocks) in loads.items():
        destination = GPULoadStoreSpec(list(blocks), [len(blocks)], [0])
        assert door.worker.submit_load(job_id, source, destination)
    door.worker.wait(set(loads))
    assert {result.job_id for result in door.worker.get_finished()} == set(loads)
    for asker, _, blocks in loads.values():
        assert all(door.holds(block, asker.content + at) for at, block in enumerate(blocks))
        door.manager.complete_load(set(asker.keys[: len(blocks)]), asker.context)
    return [asker for asker, _, _ in loads.values()]


@pytest.mark.parametrize(
    ("kind", "load_path"),
    [
        pytest.param(KVTierOffloadingSpec, "staged", id="spec"),
        pytest.param(KVTierConnectorSpec, "staged", id="staged"),
        pytest.param(KVTierConnectorSpec, "direct", id="direct"),
    ],
)
@pytest.mark.parametrize("ram", [4, 2, 1])
@pytest.mark.parametrize("requests", [1, 4])
def test_a_prefix_larger_than_ram_makes_progress_within_five_steps(
    settings: Settings,
    open_door: OpenDoor,
    kind: type[KVTierOffloadingSpec],
    load_path: str,
    ram: int,
    requests: int,
) -> None:
    extra = f"transfer:\n  load_path: {load_path}\n"
    door = open_door(settings(ram=16, extra=extra), kind)
    contents = [10 + 8 * number for number in range(requests)]
    prefixes = [fill_and_store(door, content, 8) for content in contents]
    door.settle()
    door.close()
    door = open_door(settings(ram=ram, extra=extra), kind)
    waiting = [
        Asker(keys, content, door.request())
        for keys, content in zip(prefixes, contents, strict=True)
    ]
    loaded: list[Asker] = []
    for _ in range(5):
        loaded = schedule(door, waiting, loaded)
        # A step of a real model takes longer than the disk: let it catch up.
        assert door.manager._service._engine.wait(range(1 << 10), timeout_s=DEADLINE_S)
    assert (waiting, loaded) == ([], []), "not all were scheduled"
    assert door.figures(1).hit_chunks > 0


def test_a_hit_stays_a_hit_until_the_step_ends_although_its_demotion_has_finished(
    settings: Settings, open_door: OpenDoor
) -> None:
    door = open_door(
        settings(ram=8, extra="placement:\n  write: evict\n  clean_reserve: 50%\n")
    )
    keys = fill_and_store(door, 50, 8)
    # The step above began to send the oldest chunks down; let them arrive unseen.
    assert door.manager._service._engine.wait(range(1 << 10), timeout_s=DEADLINE_S)
    context = door.request()
    door.manager._service._step_begins = False  # another request was looked up before
    assert door.lookup(keys, context) == 8
    spec = door.manager.prepare_load(keys, context)
    assert door.worker.submit_load(9, spec, GPULoadStoreSpec(list(range(8)), [8], [0]))
    door.finish(9)
    assert all(door.holds(block, 50 + block) for block in range(8))
    door.manager.complete_load(set(keys), context)
