"""The control block: the status of each slot, written by workers and read by the scheduler.

An acknowledgement names a job, and ``WorkerOutput.failed_loads`` names the loads that failed.
Neither tells which slots are whole in every rank, which slots a worker may still touch after a
reset, or when a promoted chunk has arrived. So a worker writes each slot's status here, in
memory that both sides map, *before* it acknowledges a job:

``generation[rank, slot]``
    Stamp of the write that filled this rank's part of the slot. Every write to a slot has a new
    stamp, a number, so bytes of an earlier write never count as whole.
``acknowledged[rank, slot]``
    Jobs on this slot that the rank has finished, successful or not. The scheduler counts the
    jobs it issued; while the numbers differ, a worker may still touch the slot.
``refused[rank, slot]``
    Stamp of the last write that the rank failed to load. This word is separate from
    ``generation``, which others may write at the same moment. If the bytes were only late, the
    scheduler clears the word after the load.
``pageable[rank]``
    Whether the rank could not page-lock the RAM tier. Written once, at start.

Each number is an aligned machine word. A worker writes a slot's words while it has a job on the
slot; the scheduler writes them while no worker has a job on the slot. So no lock is needed. A
worker writes before the engine reports the job as finished, and the scheduler reads after that
report. Only acknowledgements are incremented. The increments need a lock, because two loads of
one slot may end at the same time in two threads of a rank.

The storage engine writes ``generation`` when a chunk was promoted or the promotion failed, and
workers may be polling that word. The chunk's bytes are written before the word; if another
process writes them, its reply passes through a system call. A worker reads the bytes after the
word, on another thread and after a lock. So no access to the bytes is reordered around the
word.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["ControlBlock"]

_PAGE_NBYTES = 4096
_ONE = np.uint32(1)
_POISON = np.uint64(1 << 63)
"""Flag on the stamp of a failed write, which ends the wait of workers."""


class ControlBlock:
    """A view of the control words at the end of the host region.

    Implements :class:`kvtier.manager.SlotStatus` for the scheduler. The counts of issued jobs
    are not shared: they are in the scheduler's own memory.

    Args:
        buffer: At least :meth:`nbytes` bytes, zero when the region is new.
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
        self._refused: npt.NDArray[np.uint64] = np.frombuffer(
            buffer, np.uint64, words, offset=_refused_at(slots, ranks)
        ).reshape(ranks, slots)
        self._pageable: npt.NDArray[np.bool_] = np.frombuffer(
            buffer, np.bool_, ranks, offset=_pageable_at(slots, ranks)
        )
        self._issued = np.zeros(slots, np.uint32)
        self._acknowledging = threading.Lock()
        self._buffer = buffer

    @staticmethod
    def nbytes(slots: int, ranks: int) -> int:
        """Return how many bytes a control block takes, rounded up to whole pages."""
        nbytes = _pageable_at(slots, ranks) + ranks
        return -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES

    # -- worker -------------------------------------------------------------------------------

    def stamp(self, rank: int, slots: Sequence[int], generation: int) -> None:
        """Stamp ``slots`` with ``generation``: this rank has written all its bytes there."""
        self._generation[rank, _index(slots)] = generation

    def retract(self, rank: int, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Remove this rank's stamps from ``slots``, because their bytes are incomplete."""
        index = np.asarray(slots, np.intp)
        # Other stamps stay: since a reset the slot may belong to another chunk.
        borne = self._generation[rank, index] == _stamps(generations)
        self._generation[rank, index[borne]] = 0

    def acknowledge(self, rank: int, slots: Sequence[int]) -> None:
        """Record that this rank finished one job on each of ``slots``, all distinct."""
        index = _index(slots)
        with self._acknowledging:
            self._acknowledged[rank, index] += _ONE

    def bears(self, rank: int, slots: Sequence[int], generations: Sequence[int]) -> bool:
        """Return whether every slot has the required stamp, so that it may be loaded."""
        return bool((self._generation[rank, _index(slots)] == _stamps(generations)).all())

    def refuse(self, rank: int, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Record that this rank could not load ``slots`` with the stamps ``generations``."""
        if slots:
            self._refused[rank, _index(slots)] = _stamps(generations)

    def report_pageable(self, rank: int) -> None:
        """Record that this rank could not page-lock the RAM tier."""
        self._pageable[rank] = True

    def arrivals(
        self, rank: int, slots: Sequence[int], generations: Sequence[int]
    ) -> tuple[list[bool], list[bool]]:
        """Return which slots have their required stamp and which slots will never get it.

        Returns:
            Two lists with one entry per slot: whether its bytes are whole, and whether its
            bytes are lost because the write failed or the slot has another stamp.
        """
        # A copy: a stamp published between two reads of one word would look like another one.
        words = self._generation[rank, _index(slots)].copy()
        whole = words == _stamps(generations)
        return whole.tolist(), ((words != 0) & ~whole).tolist()

    # -- storage engine -----------------------------------------------------------------------

    def publish(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Stamp ``slots`` for every rank, after their bytes were read from a slower tier."""
        if slots:
            self._generation[:, _index(slots)] = _stamps(generations)

    def poison(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Stamp ``slots`` for all ranks with ``generations`` and the flag for lost bytes."""
        if slots:
            self._generation[:, _index(slots)] = _POISON | _stamps(generations)

    # -- scheduler ----------------------------------------------------------------------------

    def issue(self, slots: Sequence[int]) -> None:
        """Add one to the number of jobs issued on each of ``slots``, all distinct."""
        self._issued[_index(slots)] += _ONE

    def withdraw(self, slots: Sequence[int]) -> None:
        """Remove the stamps of ``slots``, whose bytes are about to change."""
        if slots:
            self._generation[:, _index(slots)] = 0

    def stored(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """Return for each slot whether all ranks have the required stamp."""
        if not slots:
            return []
        return _in_every_rank(self._generation[:, _index(slots)] == _stamps(generations))

    def loaded(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """Return for each slot whether all loads with its given stamp succeeded on every rank.

        True if there were no such loads.
        """
        if not slots:
            return []
        return _in_every_rank(self._refused[:, _index(slots)] != _stamps(generations))

    def forgive(self, slots: Sequence[int]) -> None:
        """Forget the failed loads of ``slots``; no load of these slots may be in progress.

        Those loads were too early. The bytes may still arrive under the same stamp, and a later
        load of the slot must not count as failed then.
        """
        if slots:
            self._refused[:, _index(slots)] = 0

    def quiet(self, slots: Sequence[int]) -> list[bool]:
        """Return for each slot whether every rank acknowledged every job issued on it."""
        if not slots:
            return []
        index = _index(slots)
        return _in_every_rank(self._acknowledged[:, index] == self._issued[index])

    def pageable_ranks(self) -> int:
        """Return how many ranks could not page-lock the RAM tier."""
        return int(self._pageable.sum())

    def release(self) -> None:
        """Release the shared memory; the control block must not be used afterwards."""
        self._generation = np.zeros((0, 0), np.uint64)
        self._acknowledged = np.zeros((0, 0), np.uint32)
        self._refused = np.zeros((0, 0), np.uint64)
        self._pageable = np.zeros(0, np.bool_)
        self._buffer.release()


def _refused_at(slots: int, ranks: int) -> int:
    """Return the byte offset of the array of refused stamps, rounded up to whole words."""
    return -(-slots * ranks * (8 + 4) // 8) * 8


def _pageable_at(slots: int, ranks: int) -> int:
    """Return the byte offset of the flags of ranks that could not page-lock the RAM tier."""
    return _refused_at(slots, ranks) + slots * ranks * 8


def _index(slots: Sequence[int]) -> slice | npt.NDArray[np.intp]:
    """Return a numpy index of ``slots``: a slice (fastest) if consecutive, else an array."""
    if slots and slots[-1] - slots[0] == len(slots) - 1:
        extent = range(slots[0], slots[-1] + 1)
        if list(slots) == list(extent):
            return slice(extent.start, extent.stop)
    return np.asarray(slots, np.intp)


def _stamps(generations: Sequence[int]) -> np.uint64 | npt.NDArray[np.uint64]:
    """Return ``generations`` as one number if all are equal, else as an array."""
    first = generations[0] if generations else 0
    if generations.count(first) == len(generations):
        return np.uint64(first)
    return np.asarray(generations, np.uint64)


def _in_every_rank(answers: npt.NDArray[np.bool_]) -> list[bool]:
    """Return for each slot whether the answers of all ranks are true.

    Each row of ``answers`` is a rank, and each column is a slot.
    """
    # For one row, the common case, the reduction would cost more than the comparison.
    listed: list[bool] = (answers[0] if len(answers) == 1 else answers.all(0)).tolist()  # type: ignore[assignment]
    return listed
