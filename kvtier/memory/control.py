"""The control block: the status of each slot, written by workers and read by the scheduler.

Workers acknowledge jobs and report failed loads in messages. These messages lack three facts:
which slots are complete in every rank, which slots a worker may still access after a reset, and
when a promoted chunk has arrived. So a worker writes each slot's status to the control block,
which both sides map, *before* it acknowledges a job:

``generation[rank, slot]``
    Generation of the write that filled this rank's part of the slot. Every write to a slot gets
    a new number, its *generation*, so bytes of an earlier write never count as complete.
``acknowledged[rank, slot]``
    Number of jobs on this slot that the rank has finished, with success or failure. The
    scheduler counts the jobs that it issued. While the numbers differ, a worker may still
    access the slot.
``failed[rank, slot]``
    Generation that the rank last failed to load. This word is separate from ``generation``,
    which other processes may write at the same moment. If the bytes were only late, the
    scheduler clears the word after the load.
``pageable[rank]``
    1 if the rank could not page-lock the RAM tier, else 0. Written once, at the start.
``hash[rank, slot]`` and ``hashed[rank, slot]``
    Hash of the bytes that this rank wrote to its part of the slot
    (:mod:`kvtier.memory.part_hashes`), and the generation of that write. Only ranks that may do
    GDS reads write these two words, and write them before ``generation``.
``gds[rank]``
    If the rank can read chunks from the NVMe tier into its GPU (GDS reads): 1 plus the number
    of the rank's part of every slot; else 0. Written at the start, and cleared when the rank
    gives up GDS reads.

Each number is an aligned machine word. A worker writes a slot's words while it has a job on the
slot; the scheduler writes them while no worker has a job on the slot. So no lock is needed. A
worker writes before the engine reports the job as finished, and the scheduler reads after that
report. Only acknowledgements are incremented. The increments need a lock, because two loads of
one slot may end at the same time in two threads of a rank.

The transfer engine that moves chunks between tiers writes ``generation`` when a chunk was
promoted or the promotion failed. Workers may be polling that word. The chunk's bytes are
written before the word; if another process writes the bytes, its reply passes through a system
call. A worker reads the word first. It then takes a lock and reads the bytes on another thread.
So the accesses to the bytes and to the word keep their order.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["ControlBlock"]

Words: TypeAlias = npt.NDArray[np.uint64]

_PAGE_NBYTES = 4096
_ONE = np.uint32(1)
_CLEARED = np.uint64(0)
_LOST = np.uint64(1 << 63)
"""Flag in the generation of a failed write; workers that see the flag stop waiting."""


class ControlBlock:
    """The status words of all slots, at the end of the host region.

    Implements :class:`kvtier.manager.SlotStatus` for the scheduler. The scheduler keeps the
    counts of issued jobs in its own memory.

    Args:
        buffer: At least :meth:`nbytes` bytes, all zero in a new region.
        slots: Number of slots.
        ranks: Number of workers.
    """

    def __init__(self, buffer: memoryview, *, slots: int, ranks: int) -> None:
        words = slots * ranks
        self._generation: npt.NDArray[np.uint64] = np.frombuffer(
            buffer, np.uint64, words
        ).reshape(ranks, slots)
        self._acknowledged: npt.NDArray[np.uint32] = np.frombuffer(
            buffer, np.uint32, words, offset=words * 8
        ).reshape(ranks, slots)
        self._failed: npt.NDArray[np.uint64] = np.frombuffer(
            buffer, np.uint64, words, offset=_failed_at(slots, ranks)
        ).reshape(ranks, slots)
        self._pageable: npt.NDArray[np.bool_] = np.frombuffer(
            buffer, np.bool_, ranks, offset=_pageable_at(slots, ranks)
        )
        self._hash, self._hashed = (
            np.frombuffer(buffer, np.uint64, words, offset=at).reshape(ranks, slots)
            for at in _hashes_at(slots, ranks)
        )
        self._gds: npt.NDArray[np.uint16] = np.frombuffer(
            buffer, np.uint16, ranks, offset=_gds_at(slots, ranks)
        )
        self._issued = np.zeros(slots, np.uint32)
        self._acknowledging = threading.Lock()
        self._buffer = buffer

    @staticmethod
    def nbytes(slots: int, ranks: int) -> int:
        """Return how many bytes a control block takes, rounded up to whole pages."""
        nbytes = _gds_at(slots, ranks) + 2 * ranks
        return -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES

    # -- worker -------------------------------------------------------------------------------

    def set_generation(self, rank: int, slots: Sequence[int], generation: int) -> None:
        """Record that this rank has written all its bytes of ``generation`` to ``slots``."""
        self._generation[rank, _index(slots)] = generation

    def retract(self, rank: int, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Undo :meth:`set_generation` in slots that still have the given generation."""
        index = np.asarray(slots, np.intp)
        # Other generations stay: since a reset the slot may belong to another chunk.
        is_same = self._generation[rank, index] == _words(generations)
        self._generation[rank, index[is_same]] = 0

    def acknowledge(self, rank: int, slots: Sequence[int]) -> None:
        """Record that this rank finished one job on each of ``slots``, which are distinct."""
        index = _index(slots)
        with self._acknowledging:
            self._acknowledged[rank, index] += _ONE

    def has_generations(
        self, rank: int, slots: Sequence[int], generations: Sequence[int]
    ) -> bool:
        """Return whether every slot has the given generation in this rank."""
        return bool((self._generation[rank, _index(slots)] == _words(generations)).all())

    def record_failed_loads(
        self, rank: int, slots: Sequence[int], generations: Sequence[int]
    ) -> None:
        """Record that this rank could not load ``generations`` from ``slots``."""
        if slots:
            self._failed[rank, _index(slots)] = _words(generations)

    def report_pageable(self, rank: int) -> None:
        """Record that this rank could not page-lock the RAM tier."""
        self._pageable[rank] = True

    def report_gds(self, rank: int, part: int) -> None:
        """Record that this rank can read its ``part`` of every slot into its GPU."""
        self._gds[rank] = part + 1

    def withdraw_gds(self, rank: int) -> None:
        """Record that this rank cannot read chunks into its GPU any more."""
        self._gds[rank] = 0

    def set_hashes(
        self, rank: int, slots: Sequence[int], hashes: Words, generation: int
    ) -> None:
        """Record the hash of the bytes of ``rank`` in each slot, and their generation."""
        index = _index(slots)
        self._hash[rank, index] = hashes
        self._hashed[rank, index] = generation

    def arrivals(
        self, rank: int, slots: Sequence[int], generations: Sequence[int]
    ) -> tuple[list[bool], list[bool]]:
        """Return for each slot whether its bytes have arrived, and whether they are lost.

        Returns:
            Two lists with one flag per slot. A flag of the first list says that all bytes have
            arrived. A flag of the second list says that the bytes are lost: the write failed,
            or the slot has another generation.
        """
        # A copy: a word published between two reads would look like another generation.
        words = self._generation[rank, _index(slots)].copy()
        whole = words == _words(generations)
        return whole.tolist(), ((words != 0) & ~whole).tolist()

    # -- transfer engine between tiers --------------------------------------------------------

    def publish(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Set the generations of ``slots`` in all ranks, because all their bytes arrived."""
        if slots:
            self._generation[:, _index(slots)] = _words(generations)

    def mark_lost(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Flag the bytes of ``generations`` in ``slots`` as lost, in all ranks."""
        if slots:
            self._generation[:, _index(slots)] = _LOST | _words(generations)

    def part_hashes(self, slots: Sequence[int], generations: Sequence[int]) -> Words:
        """Return the hashes of the parts of ``slots``, one row for each slot.

        A row has only zeros if a rank lacks the hash of the slot's generation. If several ranks
        write one part, the sum of these ranks' hashes is the hash of the part.
        """
        index = _index(slots)
        gds = self._gds.tolist()
        found = np.zeros((len(slots), max(gds) if all(gds) else 0), np.uint64)
        if not found.size:
            return found
        for rank, part in enumerate(gds):
            found[:, part - 1] += self._hash[rank, index]
        known = (self._hashed[:, index] == _words(generations)).all(0)
        found[~known] = 0
        return found

    # -- scheduler ----------------------------------------------------------------------------

    def gds_parts(self) -> int:
        """Return the number of parts of a slot; 0 if a rank cannot do GDS reads."""
        gds = self._gds.tolist()
        return max(gds) if all(gds) else 0

    def gds_ranks(self) -> int:
        """Return how many ranks can do GDS reads."""
        return int(np.count_nonzero(self._gds))

    def issue(self, slots: Sequence[int]) -> None:
        """Add one to the number of jobs issued on each of ``slots``, which are distinct."""
        self._issued[_index(slots)] += _ONE

    def clear_generations(self, slots: Sequence[int]) -> None:
        """Remove the generations of ``slots`` before their bytes change."""
        if slots:
            self._generation[:, _index(slots)] = _CLEARED  # numpy converts an int slowly

    def stored(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """Return for each slot whether all ranks have written the given generation."""
        if not slots:
            return []
        return _in_every_rank(np.equal, self._generation, slots, _words(generations))

    def loaded(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """Return for each slot whether all loads of the given generation succeeded."""
        if not slots:
            return []
        return _in_every_rank(np.not_equal, self._failed, slots, _words(generations))

    def clear_failed_loads(self, slots: Sequence[int]) -> None:
        """Forget the failed loads of ``slots``. No rank may be loading from these slots.

        These loads failed because the bytes were late. The bytes may still arrive with the same
        generation, and a later load of the slot must not count as failed.
        """
        if slots:
            self._failed[:, _index(slots)] = 0

    def all_acknowledged(self, slots: Sequence[int]) -> list[bool]:
        """Return for each slot whether all ranks acknowledged all jobs on the slot."""
        if not slots:
            return []
        issued = self._issued[_index(slots)]
        return _in_every_rank(np.equal, self._acknowledged, slots, issued)

    def pageable_ranks(self) -> int:
        """Return how many ranks could not page-lock the RAM tier."""
        return int(self._pageable.sum())

    def release(self) -> None:
        """Release the shared memory; the control block must not be used afterwards."""
        self._generation = np.zeros((0, 0), np.uint64)
        self._acknowledged = np.zeros((0, 0), np.uint32)
        self._failed = np.zeros((0, 0), np.uint64)
        self._pageable = np.zeros(0, np.bool_)
        self._hash = self._hashed = np.zeros((0, 0), np.uint64)
        self._gds = np.zeros(0, np.uint16)
        self._buffer.release()


def _failed_at(slots: int, ranks: int) -> int:
    """Return the byte offset of the array of failed loads, rounded up to a multiple of 8."""
    return -(-slots * ranks * (8 + 4) // 8) * 8


def _pageable_at(slots: int, ranks: int) -> int:
    """Return the byte offset of the flags of ranks that could not page-lock the RAM tier."""
    return _failed_at(slots, ranks) + slots * ranks * 8


def _hashes_at(slots: int, ranks: int) -> tuple[int, int]:
    """Return the byte offsets of the arrays of hashes and of their generations."""
    start = -(-(_pageable_at(slots, ranks) + ranks) // 8) * 8
    return start, start + slots * ranks * 8


def _gds_at(slots: int, ranks: int) -> int:
    """Return the byte offset of the array ``gds``, which has one number per rank."""
    return _hashes_at(slots, ranks)[1] + slots * ranks * 8


def _index(slots: Sequence[int]) -> slice | npt.NDArray[np.intp]:
    """Return a numpy index of ``slots``: a slice (fastest) if consecutive, else an array."""
    if slots and slots[-1] - slots[0] == len(slots) - 1:
        extent = range(slots[0], slots[-1] + 1)
        if list(slots) == list(extent):
            return slice(extent.start, extent.stop)
    return np.asarray(slots, np.intp)


def _words(generations: Sequence[int]) -> np.uint64 | npt.NDArray[np.uint64]:
    """Return ``generations`` as one number if all are equal, else as an array."""
    first = generations[0] if generations else 0
    if generations.count(first) == len(generations):
        return np.uint64(first)
    return np.asarray(generations, np.uint64)


def _in_every_rank(
    compare: np.ufunc,
    words: npt.NDArray[Any],
    slots: Sequence[int],
    expected: np.uint64 | npt.NDArray[Any],
) -> list[bool]:
    """Return for each slot whether ``compare(word, expected)`` is true in every rank."""
    index = _index(slots)
    answers: npt.NDArray[np.bool_]
    if len(words) == 1:  # the common case, and numpy is faster in one dimension
        answers = compare(words[0][index], expected)
    else:
        answers = compare(words[:, index], expected).all(0)
    listed: list[bool] = answers.tolist()
    return listed
