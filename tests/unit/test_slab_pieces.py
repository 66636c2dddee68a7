"""How a batch is cut into runs of neighbouring slots."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tiers.slab.pieces import plan_pieces

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
