"""The interface of storage tiers that support GDS reads: a slot file and part hashes.

In a *GDS read* a rank reads its part of a slot straight from the tier's slot file into its GPU.
The rank cannot use the tier's checksum, which covers the whole slot. So ranks hash their parts
of a chunk when they store the chunk (:mod:`kvtier.memory.part_hashes`), and the tier keeps
these part hashes beside the chunk's row. Chunks of earlier engines and chunks that came from
another tier may have no part hashes.

A GDS read verifies bytes against part hashes. So if the hashes are wrong or outdated, the read
fails; it never returns wrong bytes.
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
    """Part hashes of some chunks, and the slots of these chunks.

    Attributes:
        slots: Slots of the chunks that have part hashes.
        hashes: The part hashes; one row for each of ``slots``.
    """

    slots: npt.NDArray[np.int64]
    hashes: PartHashes


NO_PART_HASHES = StoredPartHashes(np.empty(0, np.int64), np.empty((0, 0), np.uint64))


class PartHashKeeper(ABC):
    """A storage tier that keeps part hashes and has a slot file.

    The number of hashes for each chunk is :attr:`TierContext.hash_parts
    <kvtier.tiers.base.TierContext.hash_parts>`; 0 means that the tier keeps no hashes.
    """

    @property
    @abstractmethod
    def slot_file(self) -> SlotFileId | None:
        """The file with slot ``i`` at byte ``i * slot_nbytes``; None without a file."""

    @abstractmethod
    def recovered_part_hashes(self) -> StoredPartHashes:
        """Return the part hashes that earlier engines stored.

        This method is called once, before any other method, from the thread that opened the
        tier.
        """

    @abstractmethod
    def keep_part_hashes(self, slots: Sequence[int], hashes: PartHashes) -> None:
        """Store the part hashes of the chunks just written to ``slots``. Never blocks.

        The hashes are durable within about a second, and are removed with their chunk.
        """
