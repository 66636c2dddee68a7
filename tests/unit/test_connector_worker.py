"""The connector's worker side: real memory, real threads, no engine."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kvtier.connector.device import DeviceEngine
from kvtier.connector.metadata import (
    BlockSpec,
    ConnectorMetadata,
    FailedLoad,
    SlotSpec,
    TransferJob,
    WorkerOutput,
)
from kvtier.connector.worker import ConnectorWorker
from kvtier.errors import UnsupportedError
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.copy import BlockCopier, KVBlocks
from kvtier.memory.slot_layout import RankShare
from tests.unit.kv_pages import Model, kv_of
from tests.unit.regions import open_regions

BLOCKS, SLOTS, LAYERS = 16, 8, 2
SHAPE = (BLOCKS, 2, 32, 128)
PAGE_NBYTES = 2 * 32 * 128 * 4

OpenRegion = Callable[..., HostRegion]


@pytest.fixture
def open_region() -> Iterator[OpenRegion]:
    with open_regions() as open_region:

        def make(block_nbytes: int = LAYERS * PAGE_NBYTES) -> HostRegion:
            return open_region(RegionGeometry(SLOTS, block_nbytes, block_nbytes, 1))

        yield make


def make_caches() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(SHAPE, generator=draw) for _ in range(LAYERS)]


def kv_blocks(caches: Sequence[torch.Tensor]) -> KVBlocks:
    rows = [cache.view(torch.int8).view(len(cache), -1) for cache in caches]
    return KVBlocks(rows, [[(number, row.shape[1]) for number, row in enumerate(rows)]])


def make_worker(
    kv: KVBlocks, region: HostRegion, share: RankShare | None = None, *, ram_name: str = "ram"
) -> ConnectorWorker:
    device = DeviceEngine(
        kv,
        region,
        rank=0,
        share=share or RankShare(),
        blocks_per_chunk=1,
        close_timeout_s=30.0,
    )
    return ConnectorWorker(device, ram_name=ram_name)


class Bench:
    """A worker, its KV memory and the RAM slots it copies to."""

    def __init__(self, region: HostRegion, ram_name: str = "ram") -> None:
        self.region = region
        self.caches = make_caches()
        self.worker = make_worker(kv_blocks(self.caches), region, ram_name=ram_name)

    def job(
        self, request: str, blocks: list[int], slots: list[int], generation: int
    ) -> TransferJob:
        return TransferJob(
            request,
            BlockSpec(tuple(blocks), (len(blocks),), (0,)),
            SlotSpec(tuple(slots), (generation,) * len(slots)),
        )

    def step(self, metadata: ConnectorMetadata) -> set[str]:
        """Make one step's calls, in their order; the forward pass is nothing."""
        self.worker.handle_preemptions(metadata)
        self.worker.start_load(metadata)
        self.worker.defer_stores(metadata)
        return self.worker.get_finished()

    def until(self, *jobs: int) -> WorkerOutput:
        """Step until the jobs ended; return what all the steps said."""
        output = WorkerOutput()
        while not set(jobs) <= output.completed_jobs.keys():
            flush = ConnectorMetadata(jobs_to_flush=frozenset(jobs))
            self.step(flush)
            output = output.aggregate(self.worker.take_output() or WorkerOutput())
        return output

    def has_generation(self, slot: int, generation: int) -> bool:
        return self.region.control.stored([slot], [generation])[0]

    def holds(self, block: int, other: int, original: Sequence[torch.Tensor]) -> bool:
        layers = zip(self.caches, original, strict=True)
        return all(torch.equal(cache[block], layer[other]) for cache, layer in layers)


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


def taken(bench: Bench) -> WorkerOutput:
    output = bench.worker.take_output()
    assert output is not None
    return output


def test_stored_blocks_load_into_other_blocks(bench: Bench) -> None:
    original = [cache.clone() for cache in bench.caches]
    bench.step(ConnectorMetadata(store_jobs={1: bench.job("a", [3, 4], [5, 6], 7)}))
    stored = bench.until(1)
    assert stored.completed_jobs == {1: 1}
    assert stored.failed_loads == {}
    assert bench.has_generation(5, 7)
    assert bench.has_generation(6, 7)
    bench.step(ConnectorMetadata(load_jobs={2: bench.job("b", [9, 8], [5, 6], 7)}))
    loaded = bench.until(2)
    assert bench.holds(9, 3, original)
    assert bench.holds(8, 4, original)
    assert stored.transfers.totals()["gpu_to_ram"][0] == 2 * LAYERS * PAGE_NBYTES
    assert loaded.transfers.totals()["ram_to_gpu"][0] == 2 * LAYERS * PAGE_NBYTES


def test_transfers_are_recorded_under_the_name_of_the_ram_tier(
    open_region: OpenRegion,
) -> None:
    bench = Bench(open_region(), ram_name="host")
    bench.step(ConnectorMetadata(store_jobs={1: bench.job("a", [3], [5], 7)}))
    transfers = bench.until(1).transfers
    bench.step(ConnectorMetadata(load_jobs={2: bench.job("b", [9], [5], 7)}))
    transfers.add(bench.until(2).transfers)
    bench.worker.shutdown()
    assert transfers.totals().keys() == {"gpu_to_host", "host_to_gpu"}


def test_a_store_waits_for_the_next_step(bench: Bench) -> None:
    stores = ConnectorMetadata(store_jobs={1: bench.job("a", [3], [5], 7)})
    bench.step(stores)
    assert bench.worker.take_output() is None
    assert not bench.has_generation(5, 7)
    before = bench.caches[0][3].clone()
    bench.until(1)
    assert bench.has_generation(5, 7)
    assert bytes(bench.region.slot(5)[:PAGE_NBYTES]) == before.numpy().tobytes()


def test_a_store_to_flush_has_ended_when_its_blocks_are_given_away(bench: Bench) -> None:
    bench.step(ConnectorMetadata(store_jobs={1: bench.job("a", [3], [5], 7)}))
    same_step = {2: bench.job("b", [4], [6], 8)}
    bench.worker.handle_preemptions(
        ConnectorMetadata(store_jobs=same_step, jobs_to_flush=frozenset({1, 2}))
    )
    assert bench.has_generation(5, 7)
    assert bench.has_generation(6, 8)


def test_a_flushed_store_is_not_carried_out_again_in_the_next_step(bench: Bench) -> None:
    flushed = ConnectorMetadata(
        store_jobs={2: bench.job("b", [4], [6], 8)}, jobs_to_flush=frozenset({2})
    )
    bench.step(flushed)
    assert taken(bench).completed_jobs == {2: 1}
    bench.step(ConnectorMetadata(jobs_to_flush=frozenset({2})))
    bench.step(ConnectorMetadata(jobs_to_flush=frozenset({2})))
    assert bench.worker.take_output() is None


def test_a_step_waits_for_no_store_that_need_not_be_flushed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    bench.step(ConnectorMetadata(store_jobs={1: bench.job("a", [3], [5], 7)}))
    for _ in range(3):
        bench.step(ConnectorMetadata())
    assert gate.entered.wait(20)
    assert bench.worker.take_output() is None
    bench.worker.handle_preemptions(ConnectorMetadata(jobs_to_flush=frozenset({99})))
    gate.open.set()
    assert bench.until(1).completed_jobs == {1: 1}


def test_a_load_that_finds_another_generation_fails_and_names_its_blocks(bench: Bench) -> None:
    bench.step(ConnectorMetadata(load_jobs={4: bench.job("a", [3, 9], [1, 2], 7)}))
    output = bench.until(4)
    assert output.completed_jobs == {4: 1}
    (failed,) = output.failed_loads.values()
    assert failed.request_id == "a"
    assert output.failed_requests == {"a"}
    assert output.invalid_block_ids == {3, 9}
    assert "generation" in failed.error


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
    assert not bench.has_generation(6, 8)


def test_a_request_whose_load_ended_is_reported_whether_it_worked_or_not(bench: Bench) -> None:
    bench.region.control.publish([2], [5])
    loads = {1: bench.job("a", [3], [2], 5), 2: bench.job("b", [4], [1], 5)}
    bench.worker.start_load(ConnectorMetadata(load_jobs=loads))
    bench.worker.handle_preemptions(ConnectorMetadata(jobs_to_flush=frozenset({1, 2})))
    assert bench.worker.get_finished() == {"a", "b"}
    assert taken(bench).failed_requests == {"b"}


def test_an_output_is_reported_once_and_can_be_pickled(bench: Bench) -> None:
    bench.step(ConnectorMetadata(load_jobs={4: bench.job("a", [3], [1], 7)}))
    output = bench.until(4)
    assert pickle.loads(pickle.dumps(output)) == output
    assert bench.worker.take_output() is None
    metadata = ConnectorMetadata(store_jobs={1: bench.job("a", [3], [5], 7)})
    assert pickle.loads(pickle.dumps(metadata)) == metadata


def test_ended_jobs_are_reported_in_the_order_of_their_plans(bench: Bench) -> None:
    # So that what they stored is published, and goes down, head first.
    numbers = range(7, 10)  # which a set of few would tell in another order
    for number in numbers:
        job = bench.job("a", [number], [number - 5], number)
        bench.step(ConnectorMetadata(store_jobs={number: job}))
        bench.worker.handle_preemptions(ConnectorMetadata(jobs_to_flush=frozenset({number})))
    bench.step(ConnectorMetadata())
    assert [*taken(bench).completed_jobs] == [*numbers]


def test_a_lost_store_never_counts_whether_it_began_or_not(bench: Bench) -> None:
    bench.step(ConnectorMetadata(store_jobs={1: bench.job("a", [3], [5], 7)}))
    bench.worker.defer_stores(ConnectorMetadata())  # begins it
    lost = frozenset({1, 2})
    metadata = ConnectorMetadata(
        store_jobs={2: bench.job("b", [4], [6], 8)}, jobs_to_flush=lost, lost_stores=lost
    )
    bench.step(metadata)
    assert bench.until(1, 2).failed_loads == {}
    assert not bench.has_generation(5, 7)
    assert not bench.has_generation(6, 8)


def test_an_engine_that_takes_memory_away_waits_for_all_stores(bench: Bench) -> None:
    bench.step(ConnectorMetadata(store_jobs={1: bench.job("a", [3], [5], 7)}))
    assert bench.worker.wait_for_stores()
    assert bench.has_generation(5, 7)


def test_a_job_whose_blocks_and_slots_do_not_match_fails_alone(bench: Bench) -> None:
    loads = {1: bench.job("a", [3, 4], [5], 7), 2: bench.job("b", [6], [2], 5)}
    bench.region.control.publish([2], [5])
    bench.step(ConnectorMetadata(load_jobs=loads))
    output = bench.until(1, 2)
    assert output.failed_loads.keys() == {1}
    assert output.invalid_block_ids == {3, 4}


def test_two_ranks_load_what_one_stored(open_region: OpenRegion) -> None:
    model = Model(heads=2, layers=LAYERS)
    nbytes = model.block_nbytes
    region = open_region(nbytes)
    whole = model.whole()
    job = TransferJob("a", BlockSpec((3,), (1,), (0,)), SlotSpec((5,), (7,)))
    share = model.share(0, 1)
    out = make_worker(kv_of(whole, model.heads_of(0, 1)), region, share)
    out.defer_stores(ConnectorMetadata(store_jobs={1: job}))
    out.handle_preemptions(ConnectorMetadata(jobs_to_flush=frozenset({1})))
    content = bytes(region.slot(5))
    out.shutdown()
    for rank in (0, 1):
        region = open_region(nbytes)
        region.slot(5)[:] = content
        region.control.publish([5], [7])
        # The region is this rank's alone, so the rank that its control block knows is 0.
        share = model.share(rank, 2)
        heads = model.heads_of(rank, 2)
        caches = [torch.zeros_like(layer[:, heads]) for layer in whole]
        kv = kv_of(caches, slice(None))
        into = make_worker(kv, region, share)
        into.start_load(ConnectorMetadata(load_jobs={1: job}))
        into.handle_preemptions(ConnectorMetadata(jobs_to_flush=frozenset({1})))
        assert into.get_finished() == {"a"}
        output = into.take_output()
        assert output is not None
        assert output.failed_loads == {}
        for got, wanted in zip(kv.tensors, kv_of(whole, heads).tensors, strict=True):
            assert torch.equal(got[3], wanted[3])
        into.shutdown()


def test_kv_memory_that_does_not_fit_the_slots_is_refused(open_region: OpenRegion) -> None:
    with pytest.raises(UnsupportedError, match="bytes"):
        make_worker(kv_blocks(make_caches()), open_region(PAGE_NBYTES))
