"""The connector's worker half: real memory, real threads, no engine."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from kvtier.connector.metadata import (
    BlockSpec,
    ConnectorMetadata,
    FailedLoad,
    SlotSpec,
    TransferJob,
    WorkerOutput,
)
from kvtier.connector.worker import ConnectorWorker, WorkerOptions
from kvtier.errors import KvtierError, UnsupportedError
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.copy import BlockCopier
from kvtier.memory.slot_layout import STRIPES, share_pages
from tests.unit.kv_pages import Model
from tests.unit.regions import open_regions

BLOCKS, SLOTS, LAYERS = 16, 8, 2
SHAPE = (BLOCKS, 2, 32, 128)
PAGE_NBYTES = 2 * 32 * 128 * 4
NAMES = [f"layer.{number}" for number in range(LAYERS)]

OpenRegion = Callable[..., HostRegion]


@pytest.fixture
def open_region() -> Iterator[OpenRegion]:
    with open_regions() as open_region:

        def make(block_nbytes: int = LAYERS * PAGE_NBYTES, stripes: int = 1) -> HostRegion:
            stripe_nbytes = block_nbytes // stripes
            return open_region(RegionGeometry(SLOTS, block_nbytes, stripe_nbytes, stripes, 1))

        yield make


def make_caches() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {name: torch.randn(SHAPE, generator=draw) for name in NAMES}


def options(**changes: object) -> WorkerOptions:
    fields = {"rank": 0, "blocks": BLOCKS, "blocks_per_chunk": 1, "groups": [NAMES]}
    return WorkerOptions(**(fields | changes))  # type: ignore[arg-type]


class Bench:
    """A worker, its KV memory and the RAM slots it copies to."""

    def __init__(self, region: HostRegion) -> None:
        self.region = region
        self.caches = make_caches()
        self.worker = ConnectorWorker(region, options())
        self.worker.register_kv_caches(self.caches)

    def job(self, request: str, blocks: list[int], slots: list[int], stamp: int) -> TransferJob:
        return TransferJob(
            request,
            BlockSpec(tuple(blocks), (len(blocks),), (0,)),
            SlotSpec(tuple(slots), (stamp,) * len(slots)),
        )

    def step(
        self, metadata: ConnectorMetadata, finished: frozenset[str] = frozenset()
    ) -> tuple[set[str], set[str]]:
        """Make one step's calls, in their order; the forward pass is nothing."""
        self.worker.handle_preemptions(metadata)
        self.worker.start_load(metadata)
        self.worker.defer_stores(metadata)
        return self.worker.get_finished(finished)

    def until(self, *jobs: int) -> WorkerOutput:
        """Step until the jobs ended; return what all the steps said."""
        output = WorkerOutput()
        while not set(jobs) <= output.completed_jobs.keys():
            flush = ConnectorMetadata(jobs_to_flush=frozenset(jobs))
            self.step(flush)
            output = output.aggregate(self.worker.take_output())
        return output

    def stamped(self, slot: int, stamp: int) -> bool:
        return self.region.control.stored([slot], [stamp])[0]

    def holds(self, block: int, other: int, original: Mapping[str, torch.Tensor]) -> bool:
        return all(
            torch.equal(self.caches[name][block], original[name][other]) for name in NAMES
        )


@pytest.fixture
def bench(open_region: OpenRegion) -> Iterator[Bench]:
    bench = Bench(open_region())
    yield bench
    bench.worker.shutdown()
    bench.worker.shutdown()


class Gate:
    """Holds the copy thread before each store until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        real = BlockCopier.store

        def gated(copier: BlockCopier, *arguments: Any, **named: Any) -> None:
            self.entered.set()
            assert self.open.wait(20)
            real(copier, *arguments, **named)

        monkeypatch.setattr(BlockCopier, "store", gated)


def test_what_was_stored_is_loaded_into_other_blocks(bench: Bench) -> None:
    original = {name: cache.clone() for name, cache in bench.caches.items()}
    bench.step(ConnectorMetadata(store_jobs={1: bench.job("a", [3, 4], [5, 6], 7)}))
    stored = bench.until(1)
    assert stored.completed_jobs == {1: 1}
    assert stored.failed_loads == {}
    assert bench.stamped(5, 7)
    assert bench.stamped(6, 7)
    bench.step(ConnectorMetadata(load_jobs={2: bench.job("b", [9, 8], [5, 6], 7)}))
    loaded = bench.until(2)
    assert bench.holds(9, 3, original)
    assert bench.holds(8, 4, original)
    assert [op["op_size"] for op in stored.stats["gpu_to_ram"]] == [2 * LAYERS * PAGE_NBYTES]
    assert [op["op_size"] for op in loaded.stats["ram_to_gpu"]] == [2 * LAYERS * PAGE_NBYTES]


def test_a_store_waits_for_the_next_step(bench: Bench) -> None:
    stores = ConnectorMetadata(store_jobs={1: bench.job("a", [3], [5], 7)})
    bench.step(stores)
    assert bench.worker.take_output().is_empty
    assert not bench.stamped(5, 7)
    before = bench.caches[NAMES[0]][3].clone()
    bench.until(1)
    assert bench.stamped(5, 7)
    assert bytes(bench.region.slot(5)[:PAGE_NBYTES]) == before.numpy().tobytes()


def test_a_store_to_flush_has_ended_when_its_blocks_are_given_away(bench: Bench) -> None:
    bench.step(ConnectorMetadata(store_jobs={1: bench.job("a", [3], [5], 7)}))
    same_step = {2: bench.job("b", [4], [6], 8)}
    bench.worker.handle_preemptions(
        ConnectorMetadata(store_jobs=same_step, jobs_to_flush=frozenset({1, 2}))
    )
    assert bench.stamped(5, 7)
    assert bench.stamped(6, 8)


def test_a_flushed_store_is_not_carried_out_again_in_the_next_step(bench: Bench) -> None:
    flushed = ConnectorMetadata(
        store_jobs={2: bench.job("b", [4], [6], 8)}, jobs_to_flush=frozenset({2})
    )
    bench.step(flushed)
    assert bench.worker.take_output().completed_jobs == {2: 1}
    bench.step(ConnectorMetadata(jobs_to_flush=frozenset({2})))
    bench.step(ConnectorMetadata(jobs_to_flush=frozenset({2})))
    assert bench.worker.take_output().is_empty


def test_a_step_waits_for_no_store_that_need_not_be_flushed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    bench.step(ConnectorMetadata(store_jobs={1: bench.job("a", [3], [5], 7)}))
    for _ in range(3):
        bench.step(ConnectorMetadata())
    assert gate.entered.wait(20)
    assert bench.worker.take_output().is_empty
    bench.worker.handle_preemptions(ConnectorMetadata(jobs_to_flush=frozenset({99})))
    gate.open.set()
    assert bench.until(1).completed_jobs == {1: 1}


def test_a_load_that_finds_another_stamp_fails_and_names_its_blocks(bench: Bench) -> None:
    bench.step(ConnectorMetadata(load_jobs={4: bench.job("a", [3, 9], [1, 2], 7)}))
    output = bench.until(4)
    assert output.completed_jobs == {4: 1}
    (failed,) = output.failed_loads.values()
    assert failed.request_id == "a"
    assert output.failed_requests == {"a"}
    assert output.invalid_block_ids == {3, 9}
    assert "stamp" in failed.error


def test_a_copy_that_raises_is_a_failed_load_or_a_store_that_never_counts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(BlockCopier, "store", broken)
    monkeypatch.setattr(BlockCopier, "load", broken)
    bench.region.control.publish([2], [5])
    bench.step(
        ConnectorMetadata(
            load_jobs={1: bench.job("a", [3], [2], 5)},
            store_jobs={2: bench.job("b", [4], [6], 8)},
        )
    )
    output = bench.until(1, 2)
    assert output.completed_jobs == {1: 1, 2: 1}
    assert output.failed_loads == {
        1: FailedLoad("a", frozenset({3}), "RuntimeError: the device is gone")
    }
    assert not bench.stamped(6, 8)


def test_a_request_is_reported_once_all_its_stores_ended_and_it_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    stores = {1: bench.job("a", [3], [5], 7), 2: bench.job("b", [4], [6], 8)}
    both = frozenset({"a", "c"})
    assert bench.step(ConnectorMetadata(store_jobs=stores), both) == (set(), set())
    gate.open.set()
    stored, loaded = bench.step(ConnectorMetadata(jobs_to_flush=frozenset({1, 2})))
    assert stored == {"a"}
    assert loaded == set()
    stored, _ = bench.step(ConnectorMetadata(), frozenset({"b"}))
    assert stored == {"b"}
    assert bench.step(ConnectorMetadata(), frozenset({"a", "b"})) == (set(), set())


def test_a_request_whose_load_ended_is_reported_whether_it_worked_or_not(bench: Bench) -> None:
    bench.region.control.publish([2], [5])
    loads = {1: bench.job("a", [3], [2], 5), 2: bench.job("b", [4], [1], 5)}
    bench.worker.start_load(ConnectorMetadata(load_jobs=loads))
    bench.worker.handle_preemptions(ConnectorMetadata(jobs_to_flush=frozenset({1, 2})))
    assert bench.worker.get_finished(frozenset()) == (set(), {"a", "b"})
    assert bench.worker.take_output().failed_requests == {"b"}


def test_an_output_is_told_once_and_survives_a_trip_to_another_process(bench: Bench) -> None:
    bench.step(ConnectorMetadata(load_jobs={4: bench.job("a", [3], [1], 7)}))
    output = bench.until(4)
    assert pickle.loads(pickle.dumps(output)) == output
    assert bench.worker.take_output() == WorkerOutput()
    metadata = ConnectorMetadata(store_jobs={1: bench.job("a", [3], [5], 7)})
    assert pickle.loads(pickle.dumps(metadata)) == metadata


def test_jobs_that_ended_are_told_of_in_the_order_they_were_planned(bench: Bench) -> None:
    # So that what they stored is published, and goes down, head first.
    numbers = range(7, 10)  # which a set of few would tell in another order
    for number in numbers:
        job = bench.job("a", [number], [number - 5], number)
        bench.step(ConnectorMetadata(store_jobs={number: job}))
        bench.worker.handle_preemptions(ConnectorMetadata(jobs_to_flush=frozenset({number})))
    bench.step(ConnectorMetadata())
    assert [*bench.worker.take_output().completed_jobs] == [*numbers]


def test_layers_kept_together_are_one_page_of_a_block(open_region: OpenRegion) -> None:
    region = open_region()
    worker = ConnectorWorker(region, options(groups=[["all"]]))
    cache = torch.randn((BLOCKS, LAYERS, 2, 32, 128))
    worker.register_cross_layers_kv_cache(cache)
    job = TransferJob("a", BlockSpec((3,), (1,), (0,)), SlotSpec((5,), (7,)))
    worker.defer_stores(ConnectorMetadata(store_jobs={1: job}))
    worker.handle_preemptions(ConnectorMetadata(jobs_to_flush=frozenset({1})))
    assert bytes(region.slot(5)) == cache[3].numpy().tobytes()
    worker.shutdown()


def test_two_ranks_load_what_one_stored(open_region: OpenRegion) -> None:
    model = Model(heads=2, layers=LAYERS)
    nbytes = LAYERS * model.canonical_nbytes
    region = open_region(nbytes, STRIPES)
    whole = dict(zip(NAMES, model.whole(), strict=True))
    blocks = whole[NAMES[0]].shape[0]
    job = TransferJob("a", BlockSpec((3,), (1,), (0,)), SlotSpec((5,), (7,)))
    out = ConnectorWorker(
        region, options(blocks=blocks, share=share_pages([model.mapping(0, 1)]))
    )
    out.register_kv_caches(whole)
    out.defer_stores(ConnectorMetadata(store_jobs={1: job}))
    out.handle_preemptions(ConnectorMetadata(jobs_to_flush=frozenset({1})))
    content = bytes(region.slot(5))
    out.shutdown()
    for rank in (0, 1):
        region = open_region(nbytes, STRIPES)
        region.slot(5)[:] = content
        region.control.publish([5], [7])
        # The region is this rank's alone, so the rank that its control block knows is 0.
        share = share_pages([model.mapping(rank, 2)])
        into = ConnectorWorker(region, options(blocks=blocks, share=share))
        heads = model.heads_of(rank, 2)
        caches = {name: torch.zeros_like(layer[:, heads]) for name, layer in whole.items()}
        into.register_kv_caches(caches)
        into.start_load(ConnectorMetadata(load_jobs={1: job}))
        into.handle_preemptions(ConnectorMetadata(jobs_to_flush=frozenset({1})))
        assert into.get_finished(frozenset()) == (set(), {"a"})
        assert into.take_output().failed_loads == {}
        for name, cache in caches.items():
            assert torch.equal(cache[3], whole[name][3, heads])
        into.shutdown()


def test_a_worker_without_kv_memory_says_so_and_can_be_shut_down(
    open_region: OpenRegion,
) -> None:
    worker = ConnectorWorker(open_region(), options())
    with pytest.raises(KvtierError, match="no KV caches were registered"):
        worker.get_finished(frozenset())
    worker.shutdown()


def test_kv_memory_is_taken_once(bench: Bench) -> None:
    with pytest.raises(KvtierError, match="has its KV caches already"):
        bench.worker.register_kv_caches(bench.caches)


def test_slots_of_a_tier_that_workers_cannot_reach_are_refused(bench: Bench) -> None:
    job = TransferJob("a", BlockSpec((3,), (1,), (0,)), SlotSpec((5,), (7,), tier="nvme"))
    with pytest.raises(UnsupportedError, match="tier nvme; workers know ram only"):
        bench.worker.start_load(ConnectorMetadata(load_jobs={1: job}))
