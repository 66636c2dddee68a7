"""Pieces of consecutive slots, and checksums that do not depend on how they are sliced."""

from __future__ import annotations

import os
import random

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier.os.block_io import aligned_buffer
from kvtier.slot_ranges import consecutive_ranges
from kvtier.tiers.slab.piece_io import select_digest
from tests.unit.mappings import flags_of_mappings

SLOTS = st.lists(st.integers(0, 40), max_size=40).map(sorted)


@given(slots=SLOTS, most=st.integers(1, 9))
def test_every_chunk_moves_once_in_pieces_of_neighbours(slots: list[int], most: int) -> None:
    groups = [slots[group] for group in consecutive_ranges(slots, most)]
    assert [slot for group in groups for slot in group] == slots
    for group in groups:
        assert 1 <= len(group) <= most
        assert group == list(range(group[0], group[0] + len(group)))


@given(first=st.integers(0, 1000), count=st.integers(1, 60), most=st.integers(1, 9))
def test_neighbours_take_as_few_pieces_as_possible(first: int, count: int, most: int) -> None:
    assert len(list(consecutive_ranges(range(first, first + count), most))) == -(-count // most)


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
