"""What the worker behind vLLM's half does with jobs that nobody may believe."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.slot_layout import shard_of
from kvtier.vllm.specs import SlotLoadStoreSpec
from kvtier.vllm.worker import KVTierWorker

PAGE_NBYTES = 64
STAMP = 7
BLOCK = GPULoadStoreSpec([3], group_sizes=[1], block_indices=[0])


@pytest.fixture
def region() -> Iterator[HostRegion]:
    geometry = RegionGeometry(
        slots=2, slot_nbytes=4096, stripe_nbytes=PAGE_NBYTES, stripes=1, ranks=1
    )
    region = HostRegion.create(f"worker-{os.getpid()}", geometry, attachers=0, timeout_s=1)
    region.control.issue([1])
    yield region
    region.close()


@pytest.fixture
def worker(region: HostRegion) -> Iterator[KVTierWorker]:
    pages = CanonicalKVCacheTensor(
        tensor=torch.zeros((8, PAGE_NBYTES), dtype=torch.int8), page_size_bytes=PAGE_NBYTES
    )
    refs = [CanonicalKVCacheRef(tensor_idx=0, page_size_bytes=PAGE_NBYTES)]
    worker = KVTierWorker(
        CanonicalKVCaches(tensors=[pages], group_data_refs=[refs]),
        region,
        rank=0,
        share=shard_of(0),
        blocks_per_chunk=1,
        close_timeout_s=5.0,
        reports_failed_loads=True,
    )
    yield worker
    worker.shutdown()


def test_a_store_of_what_was_computed_from_nothing_is_acknowledged_and_never_whole(
    worker: KVTierWorker, region: HostRegion
) -> None:
    worker.spoil([1])
    assert worker.submit_store(1, BLOCK, SlotLoadStoreSpec([1], [STAMP]))
    assert [(done.job_id, done.success) for done in worker.get_finished()] == [(1, True)]
    assert region.control.stored([1], [STAMP]) == [False]
    assert region.control.quiet([1]) == [True]


def test_stores_that_are_given_up_are_never_whole_whether_they_began_or_not(
    worker: KVTierWorker, region: HostRegion
) -> None:
    region.control.issue([0])
    worker.submit_store(1, BLOCK, SlotLoadStoreSpec([1], [STAMP]))
    worker.give_up(frozenset({1, 2, 3}))
    worker.submit_store(2, BLOCK, SlotLoadStoreSpec([0], [STAMP]))
    worker.wait({1, 2, 3})
    assert {(done.job_id, done.success) for done in worker.get_finished()} == {
        (1, True),
        (2, True),
    }
    assert region.control.stored([0, 1], [STAMP] * 2) == [False, False]
    assert region.control.quiet([0, 1]) == [True, True]
    region.control.issue([0])
    worker.submit_store(3, BLOCK, SlotLoadStoreSpec([0], [STAMP]))
    worker.wait({3})
    assert region.control.stored([0], [STAMP]) == [True], "nothing of it is remembered"


def test_a_load_within_the_step_that_cannot_begin_fails_like_any_other(
    worker: KVTierWorker, region: HostRegion
) -> None:
    region.control.publish([1], [STAMP])
    load = SlotLoadStoreSpec([1], [STAMP], in_step=True)
    assert worker.submit_load(2, load, BLOCK), "though no layers were announced"
    worker.start_step()
    worker.wait_for_layer("any")
    assert worker.end_step() == [2]
    assert [(done.job_id, done.success) for done in worker.get_finished()] == [(2, True)]
    (ended,) = worker.take_ended_loads().values()
    assert not ended.is_whole
    assert region.control.loaded([1], [STAMP]) == [False]
    assert worker.end_step() == []


def test_a_load_within_the_step_is_reported_once_the_pass_is_over(
    worker: KVTierWorker, region: HostRegion
) -> None:
    region.control.publish([1], [STAMP])
    worker.open_steps(["only"], timeout_s=5.0)
    worker.submit_load(2, SlotLoadStoreSpec([1], [STAMP], in_step=True), BLOCK)
    worker.start_step()
    worker.wait_for_layer("only")
    assert worker.get_finished() == []
    assert worker.end_step() == []
    assert [done.job_id for done in worker.get_finished()] == [2]
    (ended,) = worker.take_ended_loads().values()
    assert ended.is_whole
