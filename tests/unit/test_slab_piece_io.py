"""Pieces of consecutive slots, and checksums that do not depend on how they are sliced."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.slab.direct_io import aligned_buffer
from kvtier.tiers.slab.piece_io import select_digest
from kvtier.tiers.slab.pieces import plan_pieces
from tests.unit.mappings import flags_of_mappings

SLOTS = st.lists(st.integers(0, 40), max_size=40)


@given(slots=SLOTS, slots_per_piece=st.integers(1, 9), data=st.data())
def test_every_chunk_moves_once_in_pieces_of_neighbours(
    slots: list[int], slots_per_piece: int, data: st.DataObject
) -> None:
    chunks = (
        data.draw(st.lists(st.sampled_from(range(len(slots))), unique=True)) if slots else []
    )
    plan = plan_pieces(
        np.array(slots, dtype=np.int64),
        np.array(chunks, dtype=np.int64),
        slots_per_piece=slots_per_piece,
    )
    assert sorted(chunk for piece in plan for chunk in piece.chunks) == sorted(chunks)
    for piece in plan:
        assert 1 <= len(piece.chunks) <= slots_per_piece
        expected = range(piece.first_slot, piece.first_slot + len(piece.chunks))
        assert [slots[chunk] for chunk in piece.chunks] == list(expected)


@given(first=st.integers(0, 1000), count=st.integers(1, 60), slots_per_piece=st.integers(1, 9))
def test_neighbours_in_any_order_take_as_few_pieces_as_possible(
    first: int, count: int, slots_per_piece: int
) -> None:
    slots = np.random.default_rng(count).permutation(np.arange(first, first + count))
    plan = plan_pieces(slots, np.arange(count), slots_per_piece=slots_per_piece)
    assert len(plan) == -(-count // slots_per_piece)


def test_memory_for_the_bytes_of_chunks_is_in_no_core_dump() -> None:
    before, buffers = undumped_mappings(), [aligned_buffer(4096), aligned_buffer(1 << 20)]
    assert undumped_mappings() - before == len(buffers)


def undumped_mappings() -> int:
    """Return the number of anonymous shared mappings that a core dump leaves out."""
    return sum("dd" in flags for flags in flags_of_mappings(os.getpid(), "/dev/zero"))


EDGES = (
    4096,
    64 << 10,
    128 << 10,
    (256 << 10) - 1,
    256 << 10,
    1 << 20,
    (1 << 20) + 4096,
    9 << 20,
)


@pytest.mark.parametrize("nbytes", EDGES)
@pytest.mark.parametrize("alone", [True, False])
def test_slices_do_not_change_a_checksum(nbytes: int, *, alone: bool) -> None:
    payload = memoryview(random.Random(nbytes).randbytes(nbytes))
    seed = 2**64 - nbytes
    whole = xxhash.xxh3_64_intdigest(payload, seed=seed)
    assert select_digest(alone=alone)(payload, seed) == whole
