"""What really happened to each slot, written by workers and read by the scheduler.

vLLM's offloading contract lets a worker report only success: anything else kills the engine,
or, where a connector can report a failed load, says nothing about the chunk. So a worker
acknowledges every job and leaves the truth here, in memory both sides map, *before* it
acknowledges:

``generation[rank, slot]``
    Stamp of the write whose bytes of this rank are whole. The scheduler gives every write a new
    stamp, so "whole" cannot be confused with "was whole before".
``acknowledged[rank, slot]``
    Jobs on this slot that the rank has finished, whatever came of them. The scheduler counts
    what it issued; while the two differ a worker may still touch the slot.
``refused[rank, slot]``
    Stamp of the last write whose bytes the rank was to load and could not. A word of its own,
    and not an erased ``generation``: the slot may be stamped by others at the same moment. If
    they were only late, the scheduler takes the word away when the load is over.

Each number is an aligned machine word. A worker writes while it has a job on the slot, the
scheduler while nobody has, so no lock is needed: the engine's own message, which follows the
write, orders it before the scheduler's read. Only acknowledgements are counted up, and two
loads of one slot may end at once in two threads of a rank, one of them within the forward pass:
these take turns.

The storage engine writes ``generation`` when a chunk has come up from a slower tier, or will
not, and workers may be waiting for that word. The bytes it speaks for were written before it by
whoever read them, in another process even, and the answer to that passed through a system call;
the worker that saw the word reads them on another thread, after a lock. So neither can be
reordered around the word.
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
"""Beside the stamp of a write that failed: whoever waits for it need not wait any longer."""


class ControlBlock:
    """A view of the control words at the end of the host region.

    Implements :class:`kvtier.manager.SlotStatus` for the scheduler, which counts what it
    issues in its own memory.

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
        self._issued = np.zeros(slots, np.uint32)
        self._acknowledging = threading.Lock()
        self._buffer = buffer

    @staticmethod
    def nbytes(slots: int, ranks: int) -> int:
        """Return the bytes a control block takes, in whole pages."""
        nbytes = _refused_at(slots, ranks) + slots * ranks * 8
        return -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES

    # -- worker -------------------------------------------------------------------------------

    def stamp(self, rank: int, slots: Sequence[int], generation: int) -> None:
        """Record that this rank's bytes of ``slots`` are whole as of ``generation``."""
        self._generation[rank, _index(slots)] = generation

    def retract(self, rank: int, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Take this rank's stamps back: the bytes are not whole after all."""
        index = np.asarray(slots, np.intp)
        # No other word is written: the slot may be somebody else's since a reset.
        borne = self._generation[rank, index] == _stamps(generations)
        self._generation[rank, index[borne]] = 0

    def acknowledge(self, rank: int, slots: Sequence[int]) -> None:
        """Record that this rank is done with one job on each of ``slots``; no slot twice."""
        index = _index(slots)
        with self._acknowledging:
            self._acknowledged[rank, index] += _ONE

    def bears(self, rank: int, slots: Sequence[int], generations: Sequence[int]) -> bool:
        """Return whether every slot bears the stamp it should, so that it may be loaded."""
        return bool((self._generation[rank, _index(slots)] == _stamps(generations)).all())

    def refuse(self, rank: int, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Record that this rank could not load the bytes of these stamps from ``slots``."""
        if slots:
            self._refused[rank, _index(slots)] = _stamps(generations)

    def arrivals(
        self, rank: int, slots: Sequence[int], generations: Sequence[int]
    ) -> tuple[list[bool], list[bool]]:
        """Say which slots bear the stamp they should, and which never will.

        Returns:
            Per slot, whether its bytes are whole, and whether they will not come: because that
            was said, or because the slot is somebody else's by now.
        """
        # A copy: what is published between two looks at one word would seem somebody else's.
        words = self._generation[rank, _index(slots)].copy()
        whole = words == _stamps(generations)
        return whole.tolist(), ((words != 0) & ~whole).tolist()

    # -- storage engine -----------------------------------------------------------------------

    def publish(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Stamp slots for every rank: their bytes came whole from a slower tier."""
        if slots:
            self._generation[:, _index(slots)] = _stamps(generations)

    def poison(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Tell every rank that the bytes of these stamps will not come."""
        if slots:
            self._generation[:, _index(slots)] = _POISON | _stamps(generations)

    # -- scheduler ----------------------------------------------------------------------------

    def issue(self, slots: Sequence[int]) -> None:
        """Count one more job on each of ``slots``; no slot twice."""
        self._issued[_index(slots)] += _ONE

    def withdraw(self, slots: Sequence[int]) -> None:
        """Take the stamps off ``slots``: their bytes are about to change, so none may load."""
        if slots:
            self._generation[:, _index(slots)] = 0

    def stored(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """Return for each slot whether every rank's bytes of that generation are whole."""
        if not slots:
            return []
        return _in_every_rank(self._generation[:, _index(slots)] == _stamps(generations))

    def loaded(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """Return for each slot whether no rank refused to load the bytes of that stamp."""
        if not slots:
            return []
        return _in_every_rank(self._refused[:, _index(slots)] != _stamps(generations))

    def forgive(self, slots: Sequence[int]) -> None:
        """Forget which stamps ranks could not load from ``slots``, where none has a load.

        They waited for bytes that were not there yet. When these have come, under the same
        stamp, whoever loads them is not to be taken for one who could not.
        """
        if slots:
            self._refused[:, _index(slots)] = 0

    def quiet(self, slots: Sequence[int]) -> list[bool]:
        """Return for each slot whether every rank acknowledged every job issued on it."""
        if not slots:
            return []
        index = _index(slots)
        return _in_every_rank(self._acknowledged[:, index] == self._issued[index])

    def release(self) -> None:
        """Let go of the shared memory; the block must not be used afterwards."""
        self._generation = np.zeros((0, 0), np.uint64)
        self._acknowledged = np.zeros((0, 0), np.uint32)
        self._refused = np.zeros((0, 0), np.uint64)
        self._buffer.release()


def _refused_at(slots: int, ranks: int) -> int:
    """Return where the refused stamps begin: behind the two others, aligned to a word."""
    return -(-slots * ranks * (8 + 4) // 8) * 8


def _index(slots: Sequence[int]) -> slice | npt.NDArray[np.intp]:
    """Return ``slots`` as numpy indexes them fastest: mostly they are one extent."""
    if slots and slots[-1] - slots[0] == len(slots) - 1:
        extent = range(slots[0], slots[-1] + 1)
        if list(slots) == list(extent):
            return slice(extent.start, extent.stop)
    return np.asarray(slots, np.intp)


def _stamps(generations: Sequence[int]) -> np.uint64 | npt.NDArray[np.uint64]:
    """Return ``generations``, or the one that all are: converting a list costs more."""
    first = generations[0] if generations else 0
    if generations.count(first) == len(generations):
        return np.uint64(first)
    return np.asarray(generations, np.uint64)


def _in_every_rank(answers: npt.NDArray[np.bool_]) -> list[bool]:
    """Return for each slot whether every row says so."""
    # Over one row, which is the common case, the reduction costs more than the comparison.
    listed: list[bool] = (answers[0] if len(answers) == 1 else answers.all(0)).tolist()  # type: ignore[assignment]
    return listed
