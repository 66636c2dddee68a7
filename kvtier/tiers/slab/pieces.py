"""Plans of pieces: group the slots of a batch so that one system call moves many slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.tiers.slab.piece_io import consecutive_ranges

__all__ = ["Piece", "plan_pieces"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Chunks of a batch in consecutive slots.

    Attributes:
        first_slot: Slot of the first chunk; chunk ``i`` of the piece is ``i`` slots further.
        chunks: Positions in the batch, in slot order.
    """

    first_slot: int
    chunks: Sequence[int]


def plan_pieces(
    slots: npt.NDArray[np.int64], chunks: npt.NDArray[np.int64], *, slots_per_piece: int
) -> list[Piece]:
    """Group ``chunks`` of a batch into as few pieces as their slots allow.

    Args:
        slots: Slot of each chunk of the batch, in any order.
        chunks: Positions in the batch of the chunks to move.
        slots_per_piece: Largest number of slots of a piece.

    >>> plan = plan_pieces(np.array([7, 3, 8, 9]), np.arange(4), slots_per_piece=2)
    >>> [(piece.first_slot, piece.chunks) for piece in plan]
    [(3, [1]), (7, [0, 2]), (9, [3])]
    """
    ordered = chunks[np.argsort(slots[chunks], kind="stable")]
    numbers = slots[ordered].tolist()
    return [
        Piece(numbers[some.start], ordered[some].tolist())
        for some in consecutive_ranges(numbers, slots_per_piece)
    ]
