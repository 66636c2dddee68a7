"""Page-locking of the slots, in segments."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import CudaError
from kvtier.memory import RegionGeometry
from kvtier.memory.fragments import Fragments
from kvtier.memory.pinning import PinnedSlots, cut
from tests.support.fake_cuda import FakeCuda

ADDRESS = 1 << 40
GIB = 1 << 30


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda(random.Random(0))


def lock(cuda: FakeCuda, slots: int, slot_nbytes: int) -> PinnedSlots:
    geometry = RegionGeometry(slots, slot_nbytes, slot_nbytes, 1, bounce_slots=2)
    return PinnedSlots(cuda, ADDRESS, geometry)


@pytest.mark.parametrize(
    ("slots", "slot_nbytes", "segments"),
    [
        (4, GIB, [4]),
        (64, GIB, [64]),
        (65, GIB, [64, 1]),
        (10, 25 * GIB, [2, 2, 2, 2, 2]),
        (3, 100 * GIB, [1, 1, 1]),
    ],
)
def test_segments_end_where_slots_end_and_have_64_gib_at_most(
    cuda: FakeCuda, slots: int, slot_nbytes: int, segments: list[int]
) -> None:
    pinned = lock(cuda, slots, slot_nbytes)
    assert pinned.is_locked
    assert [nbytes // slot_nbytes for nbytes in cuda.locked.values()] == segments
    assert list(cuda.locked) == [ADDRESS, *pinned.edges]
    pinned.close()
    pinned.close()
    assert not cuda.locked


@pytest.mark.parametrize("locked", [0, 1, 2])
def test_when_a_segment_is_refused_nothing_stays_locked_and_one_warning_says_so(
    cuda: FakeCuda, locked: int, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.refuses_from = locked
    pinned = lock(cuda, 160, GIB)
    assert not pinned.is_locked
    assert not cuda.locked
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"segment {locked + 1} of 3: cuMemHostRegister" in record.getMessage()
    pinned.close()


def test_memory_that_is_not_released_is_logged_and_the_rest_is_released(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    pinned = lock(cuda, 160, GIB)
    del cuda.locked[ADDRESS + 64 * GIB]
    pinned.close()
    assert not cuda.locked
    assert "page-locked memory was not released: cuMemHostUnregister" in caplog.text


def test_memory_that_is_locked_already_is_refused(cuda: FakeCuda) -> None:
    pinned = lock(cuda, 4, GIB)
    with pytest.raises(CudaError, match="ALREADY_REGISTERED"):
        cuda.register(ADDRESS + 3 * GIB, 2 * GIB)
    pinned.close()


@given(
    lengths=st.lists(st.integers(1, 30), max_size=8),
    edges=st.sets(st.integers(0, 200), max_size=6),
    data=st.data(),
)
def test_copies_are_cut_at_edges_and_copy_the_same_bytes(
    lengths: list[int], edges: set[int], data: st.DataObject
) -> None:
    host = [data.draw(st.integers(0, 190)) for _ in lengths]
    device = [1000 * (number + 1) for number in range(len(lengths))]
    whole = Fragments(*(np.array(each, np.int64) for each in (device, host, lengths)))
    parts = cut(whole, np.array(sorted(edges), np.int64))
    found = sorted(pair for part in each_byte(parts) for pair in part)
    assert found == sorted(pair for fragment in each_byte(whole) for pair in fragment)
    for part in each_byte(parts):
        assert part, "a copy of nothing"
        assert not edges.intersection(at for _, at in part[1:]), "a copy crosses an edge"


def each_byte(fragments: Fragments) -> list[list[tuple[int, int]]]:
    """Return, per fragment, the device and the host address of each byte."""
    ranges = zip(fragments.device, fragments.host, fragments.nbytes, strict=True)
    return [
        [(int(device) + at, int(host) + at) for at in range(nbytes)]
        for device, host, nbytes in ranges
    ]
