"""The part of a storage tier that GDS reads need: its slot file, and hashes beside its chunks.

A rank that reads a slot of the tier itself cannot use the tier's checksum, which covers the
whole slot. So ranks hash their parts of a chunk when they store it
(:mod:`kvtier.memory.part_hashes`), and the tier keeps these hashes beside the chunk's row. A
chunk may have none: those of earlier engines, and those that another tier wrote.

A read verifies bytes against hashes. So hashes of another chunk, or of a chunk that is gone,
make a read fail and never make it return wrong bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.types import SlotFileId

__all__ = ["NO_PART_HASHES", "PartHashKeeper", "PartHashes", "StoredPartHashes"]

PartHashes: TypeAlias = npt.NDArray[np.uint64]
"""Hashes of the parts of chunks, one row for each chunk."""


class StoredPartHashes(NamedTuple):
    """What a tier has kept.

    Attributes:
        slots: Slots of chunks.
        hashes: One row for each of ``slots``.
    """

    slots: npt.NDArray[np.int64]
    hashes: PartHashes


NO_PART_HASHES = StoredPartHashes(np.empty(0, np.int64), np.empty((0, 0), np.uint64))


class PartHashKeeper(ABC):
    """A storage tier that keeps part hashes and has a slot file.

    It keeps them if :attr:`TierContext.hash_parts <kvtier.tiers.base.TierContext.hash_parts>`
    is not 0, as many for each chunk.
    """

    @property
    @abstractmethod
    def slot_file(self) -> SlotFileId | None:
        """The file that has slot ``i`` at byte ``i * slot_nbytes``; None if there is none."""

    @abstractmethod
    def recovered_part_hashes(self) -> StoredPartHashes:
        """Return the hashes that earlier runs left.

        Called once, before any other method, from the thread that opened the tier.
        """

    @abstractmethod
    def keep_part_hashes(self, slots: Sequence[int], hashes: PartHashes) -> None:
        """Keep the hashes of ``slots``, whose chunks have just been written. Never blocks.

        They are dropped with the chunk, and durable within a second or so.
        """
