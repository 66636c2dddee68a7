"""The scheduler side of GDS reads: decides which slots the workers can read.

In a GDS read each worker reads a slot of a tier into its GPU. Workers can verify a slot only if
the hashes of all its parts are known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.memory import ControlBlock
from kvtier.tiers.base import StorageTier
from kvtier.tiers.part_hashes import PartHashes, PartHashKeeper
from kvtier.types import GdsReads, SlotFileId

__all__ = ["GdsSlots"]


class GdsSlots:
    """Keeps the part hashes of one tier's slots, and reports which slots workers can read.

    Implements :class:`kvtier.manager.GdsSource` for the manager's thread, and
    :class:`kvtier.transfer.routes.PartHashStore` for the transfer thread. No lock is needed,
    because the threads never use the hashes of one slot at the same time. The manager clears
    them before it queues the job that writes the slot, and reads them only after that job's
    result. The transfer thread sets them in between.

    Args:
        tier: Index of the tier.
        storage: The tier.
        keeper: The same tier, as the object that keeps the part hashes.
        file: The tier's slot file.
        ranks: The control block with the ranks' reports.
    """

    def __init__(
        self,
        tier: int,
        storage: StorageTier,
        keeper: PartHashKeeper,
        file: SlotFileId,
        ranks: ControlBlock,
    ) -> None:
        self.tier = tier
        self._storage = storage
        self._keeper = keeper
        self._file = file
        self._ranks = ranks
        self._parts = ranks.gds_parts()
        # A part's hash is 0 with a probability of 2**-64, so 0 stands for an unknown hash.
        self._part_hashes: PartHashes
        self._part_hashes = np.zeros((storage.capacity_slots, self._parts), np.uint64)
        slots, part_hashes = keeper.recovered_part_hashes()
        if part_hashes.shape[1:] == (self._parts,):
            self._part_hashes[slots] = part_hashes

    # -- manager ------------------------------------------------------------------------------

    def readable(self, slots: Sequence[int]) -> Sequence[bool]:
        """Return, for each of ``slots``, whether all workers can read and verify it now."""
        if self._ranks.gds_parts() != self._parts:
            return [False] * len(slots)
        known: npt.NDArray[np.bool_] = (self._part_hashes[slots] != 0).all(1)
        answers: list[bool] = known.tolist()
        return answers

    def plan_reads(self, positions: Sequence[int], slots: Sequence[int]) -> GdsReads:
        """Return the GDS reads of ``slots``, for the chunks at ``positions`` in a load."""
        return GdsReads(self._file, positions, slots, self._part_hashes[slots].tobytes())

    def begin_overwriting(self, slots: Sequence[int]) -> None:
        """Forget the part hashes of ``slots``, because other chunks will be written there."""
        self._part_hashes[slots] = 0

    def touch(self, slots: Sequence[int]) -> None:
        """Record that ``slots`` were read."""
        if slots:
            self._storage.touch(slots)

    # -- transfer engine ----------------------------------------------------------------------

    def ram_part_hashes(self, slots: Sequence[int], generations: Sequence[int]) -> PartHashes:
        """Return a row of part hashes for each RAM slot; rows of unknown hashes are 0."""
        return self._ranks.part_hashes(slots, generations)

    def keep_part_hashes(self, slots: Sequence[int], part_hashes: PartHashes) -> None:
        """Keep the part hashes of chunks that were written to the tier's ``slots``."""
        if part_hashes.shape[1:] != (self._parts,):
            return  # a rank has given up GDS reads meanwhile
        known = (part_hashes != 0).all(1)
        if known.any():
            numbers = np.asarray(slots, np.int64)[known]
            self._part_hashes[numbers] = part_hashes[known]
            self._keeper.keep_part_hashes(numbers.tolist(), part_hashes[known])
