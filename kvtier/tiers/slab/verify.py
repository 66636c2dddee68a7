"""Verify a namespace: compare every chunk with its checksum, even while an engine runs.

A running engine overwrites slots. Between the write of a payload and the commit of the
payload's row, the slot does not match the index, which looks like damage. So a chunk with a
wrong checksum is only a suspect. A suspect is bad if a moment later the row is unchanged and
the bytes are still wrong.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Final, NamedTuple

from kvtier.os.block_io import IOV_MAX, BlockIo, aligned_buffer
from kvtier.os.ordered_calls import run_in_order
from kvtier.slot_ranges import consecutive_ranges
from kvtier.tiers.slab.index_reader import Entry, IndexReader
from kvtier.tiers.slab.inspect import StoredNamespace
from kvtier.tiers.slab.namespace import SLOTS
from kvtier.tiers.slab.piece_io import PieceBuffers, hash_key, read_piece, select_digest
from kvtier.tiers.slab.slots import SlotFile
from kvtier.types import Outcome

__all__ = ["BadChunk", "Verification", "verify"]

_THREADS: Final = 4
_PIECE_NBYTES: Final = 8 << 20
# Rows become outdated, so the rows of at most this many payload bytes are read at once.
_WINDOW_NBYTES: Final = 256 << 20
_SETTLE_S: Final = 2.0  # an engine commits a row much sooner after its payload


@dataclass(frozen=True, slots=True)
class BadChunk:
    """A chunk that an engine could not use: unreadable, or with a wrong checksum."""

    entry: Entry
    unreadable: bool


@dataclass(slots=True)
class Verification:
    """Result of verifying one namespace.

    Attributes:
        nbytes: Payload bytes of the chunks that could be read whole.
        seconds: Seconds that the reads took.
        changed: Number of suspects that an engine replaced or removed before the second check.
    """

    chunks: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    changed: int = 0
    bad: list[BadChunk] = field(default_factory=list)


def verify(
    space: StoredNamespace,
    reader: IndexReader,
    *,
    stored_after: int = -1,
    on_progress: Callable[[int], None] = lambda _: None,
    pause: Callable[[float], None] = time.sleep,
) -> Verification:
    """Read every chunk of ``space`` and compare it with its checksum. This call blocks.

    Args:
        space: The namespace.
        reader: The open index of ``space``.
        stored_after: Read only chunks of later generations.
        on_progress: Called with the number of slots finished since the last call.
        pause: Sleeps for the given seconds.

    Raises:
        IndexDamagedError: The index cannot be used.
        OSError: The files cannot be opened, or were removed during the verification.
        sqlite3.Error: The index cannot be read now.
    """
    found = Verification()
    slot_nbytes = space.layout.slot_nbytes
    file = SlotFile.open_to_read(space.directory / SLOTS, slot_nbytes, BlockIo())
    try:
        checker = _Checker(file, slot_nbytes)
        began_s = time.monotonic()
        suspects: list[BadChunk] = []
        windows = _windows(reader, file, checker, slot_nbytes, stored_after)
        for done in run_in_order(windows, threads=_THREADS, name="kvtier-verify"):
            suspects += done.bad
            found.chunks += done.chunks
            found.nbytes += (done.chunks - _unread(done.bad, file, slot_nbytes)) * slot_nbytes
            on_progress(done.slots)
        found.seconds = time.monotonic() - began_s
        _classify(suspects, found, reader, checker, pause)
        if file.is_removed():  # then the results are meaningless
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file.path))
    finally:
        file.close()
    return found


class _Done(NamedTuple):
    """Numbers of chunks and slots that one call has processed, and the bad chunks."""

    chunks: int
    slots: int
    bad: Sequence[BadChunk] = ()


def _unread(bad: Sequence[BadChunk], file: SlotFile, slot_nbytes: int) -> int:
    """Return how many chunks of ``bad`` could not be read completely."""
    slots = file.found_nbytes // slot_nbytes
    return sum(chunk.unreadable or chunk.entry.slot >= slots for chunk in bad)


class _Checker:
    """Reads and verifies chunks; several threads may use it at once."""

    def __init__(self, file: SlotFile, slot_nbytes: int) -> None:
        self._file = file
        self._slot_nbytes = slot_nbytes
        self._digest = select_digest(alone=True)
        self.slots_per_piece = min(IOV_MAX, max(1, _PIECE_NBYTES // slot_nbytes))
        self._buffers: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(_THREADS):
            self._buffers.put(aligned_buffer(self.slots_per_piece * slot_nbytes))

    def check(self, entries: Sequence[Entry]) -> list[BadChunk]:
        """Return the bad chunks among ``entries``, whose slots are consecutive."""
        buffer = self._buffers.get()
        try:
            step = self._slot_nbytes
            piece = PieceBuffers(
                entries[0].slot,
                [buffer[at * step : (at + 1) * step] for at in range(len(entries))],
                [hash_key(entry.key) for entry in entries],
            )
            stored = [entry.checksum for entry in entries]
            moved = read_piece(self._file, piece, stored, self._digest)
        finally:
            self._buffers.put(buffer)
        return [
            BadChunk(entry, unreadable=outcome is Outcome.FAILED)
            for entry, outcome in zip(entries, moved.outcomes, strict=True)
            if outcome is not Outcome.DONE
        ]


def _windows(
    reader: IndexReader, file: SlotFile, checker: _Checker, slot_nbytes: int, stored_after: int
) -> Iterator[Callable[[], _Done]]:
    """Yield functions that each check one piece; read the index some slots at a time."""
    end = max(file.found_nbytes // slot_nbytes, 1)
    step = max(_WINDOW_NBYTES // slot_nbytes, 1)
    for first in range(0, end, step):
        entries = reader.entries_of_slots(first, min(first + step, end), stored_after)
        slots = [entry.slot for entry in entries]
        for piece in consecutive_ranges(slots, checker.slots_per_piece):
            yield partial(_check, checker, entries[piece])
        yield partial(_Done, 0, min(step, end - first))
    beyond = reader.entries_of_slots(end, 1 << 62, stored_after)
    yield lambda: _Done(len(beyond), 0, [BadChunk(e, unreadable=False) for e in beyond])


def _check(checker: _Checker, entries: Sequence[Entry]) -> _Done:
    return _Done(len(entries), 0, checker.check(entries))


def _classify(
    suspects: Sequence[BadChunk],
    found: Verification,
    reader: IndexReader,
    checker: _Checker,
    pause: Callable[[float], None],
) -> None:
    """Check ``suspects`` again; add bad ones to ``found``, and count changed ones."""
    left = _unchanged(suspects, found, reader, checker)
    if left and reader.live:
        pause(_SETTLE_S)
        left = _unchanged(left, found, reader, checker)
    found.bad += left


def _unchanged(
    suspects: Sequence[BadChunk], found: Verification, reader: IndexReader, checker: _Checker
) -> list[BadChunk]:
    """Check ``suspects`` again; return those that are still bad, with unchanged rows."""
    left: list[BadChunk] = []
    for suspect in suspects:
        slot = suspect.entry.slot
        rows = reader.entries_of_slots(slot, slot + 1)
        if not rows or rows[0].generation != suspect.entry.generation:
            found.changed += 1
        else:
            left += checker.check(rows)
    return left
