"""Slots whose bytes do not depend on the number of ranks: copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kvtier.errors import UnsupportedError
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.memory.copy import BlockCopier, plan_copy
from kvtier.memory.slot_layout import (
    STRIPES,
    RankShare,
    shard_of,
)
from tests.unit.kv_pages import BLOCKS, Model, kv_of
from tests.unit.regions import open_regions

SLOTS = 8
OpenSlots = Callable[[Model, int], HostRegion]


@pytest.fixture
def open_slots() -> Iterator[OpenSlots]:
    with open_regions() as open_region:

        def make(model: Model, blocks_per_chunk: int) -> HostRegion:
            nbytes = model.layers * model.canonical_nbytes // STRIPES * blocks_per_chunk
            return open_region(RegionGeometry(SLOTS, STRIPES * nbytes, nbytes, STRIPES, 1))

        yield make


def test_keys_apart_from_values_are_two_runs_of_stripes() -> None:
    share = RankShare((2, 3, 6, 7))
    assert list(share.runs()) == [(slice(0, 2), slice(2, 4)), (slice(2, 4), slice(6, 8))]


@pytest.mark.parametrize(
    ("writers", "readers", "heads", "blocks_per_chunk"),
    [
        (1, 2, 2, 1),
        (1, 2, 2, 4),
        (2, 1, 2, 1),
        (2, 1, 2, 4),
        (4, 2, 8, 4),
        (2, 4, 2, 2),
        (4, 1, 2, 4),
        (1, 4, 1, 1),
        (8, 2, 1, 4),
    ],
)
def test_what_any_number_of_ranks_stored_any_other_number_loads(
    open_slots: OpenSlots, writers: int, readers: int, heads: int, blocks_per_chunk: int
) -> None:
    model = Model(heads=heads)
    region = open_slots(model, blocks_per_chunk)
    whole = model.whole()
    stored, loaded = [7, 3, 1, 10, 4, 0], [2, 5, 9, 8, 11, 6]
    slots = [5, 6, 2, 7, 0, 3][: -(-len(stored) // blocks_per_chunk)]
    plan = plan_copy(stored, [6], [0], slots, blocks_per_chunk=blocks_per_chunk)
    for rank in range(writers):
        kv = kv_of(whole, model.heads_of(rank, writers))
        share = model.share(rank, writers)
        out = BlockCopier(kv, region, share=share, blocks_per_chunk=blocks_per_chunk)
        out.store(plan, after=None)
        out.close()
    back = plan_copy(loaded, [6], [0], slots, blocks_per_chunk=blocks_per_chunk)
    for rank in range(readers):
        own = model.heads_of(rank, readers)
        kv = kv_of([torch.zeros_like(layer) for layer in whole], own)
        share = model.share(rank, readers)
        into = BlockCopier(kv, region, share=share, blocks_per_chunk=blocks_per_chunk)
        into.load(back, after=None)
        into.close()
        expected = kv_of(whole, own)
        for got, wanted in zip(kv.tensors, expected.tensors, strict=True):
            assert torch.equal(got[loaded], wanted[stored])
            assert not got[[block for block in range(BLOCKS) if block not in loaded]].any()


def test_a_slot_holds_the_same_bytes_whatever_the_number_of_ranks(
    open_slots: OpenSlots,
) -> None:
    model = Model(heads=2)
    whole = model.whole()
    contents = set()
    for ranks in (1, 2, 4):
        region = open_slots(model, 2)
        for rank in range(ranks):
            out = BlockCopier(
                kv_of(whole, model.heads_of(rank, ranks)),
                region,
                share=model.share(rank, ranks),
                blocks_per_chunk=2,
            )
            out.store(plan_copy([4, 9], [2], [0], [1], blocks_per_chunk=2), after=None)
            out.close()
        contents.add(bytes(region.slot(1)))
    assert len(contents) == 1
    assert contents != {bytes(len(contents.pop()))}


def test_a_rank_that_is_not_the_writer_of_a_block_leaves_its_slot_alone(
    open_slots: OpenSlots,
) -> None:
    model = Model(heads=1)
    region = open_slots(model, 1)
    share = model.share(1, 2)
    out = BlockCopier(
        kv_of(model.whole(), slice(0, 1)), region, share=share, blocks_per_chunk=1
    )
    out.store(plan_copy([2, 3], [2], [0], [0, 1], blocks_per_chunk=1), after=None)
    assert not any(region.slot(0))
    assert any(region.slot(1))
    out.close()


def test_a_stripe_that_the_slots_do_not_have_is_refused(open_slots: OpenSlots) -> None:
    model = Model()
    with pytest.raises(UnsupportedError, match="has 8 stripes, a rank wants stripe 9"):
        BlockCopier(
            kv_of(model.whole(), slice(0, 2)),
            open_slots(model, 1),
            share=shard_of(9),
            blocks_per_chunk=1,
        )


def test_pages_without_as_many_parts_as_the_rank_has_stripes_are_refused(
    open_slots: OpenSlots,
) -> None:
    model = Model(layers=1)
    kv = kv_of(model.whole(), slice(0, 2))
    kv.groups[0][0] = (0, 4095)  # type: ignore[index]
    share = model.share(0, 1)
    with pytest.raises(UnsupportedError, match="cannot be split into 8 parts"):
        BlockCopier(kv, open_slots(model, 1), share=share, blocks_per_chunk=1)
