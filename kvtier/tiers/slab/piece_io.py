"""Piece I/O: move a piece in one system call, and verify checksums.

A piece is a group of chunks in consecutive slots. Functions that move a piece run in a thread
of the pool.

xxhash releases the interpreter lock for buffers above some 64 KiB. In the engine's process the
release costs more time than it saves: hashing a slot takes tens of microseconds, but getting
the lock back from a busy engine thread takes 5 ms, the switch interval. So the engine's process
hashes small slices, for which xxhash keeps the lock. A tier in its own process hashes large
slots in large slices. Hashing 2 MiB then takes 1/7 less time, because long sequences are read
faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from kvtier.tiers.slab.slots import SlotFile
from kvtier.types import Outcome

__all__ = [
    "Digest",
    "MovedPiece",
    "PieceBuffers",
    "hash_key",
    "read_piece",
    "select_digest",
    "write_piece",
]

Digest = Callable[[memoryview, int], int]
"""Takes the bytes of a slot and a seed; returns an unsigned 64-bit checksum."""

_HELD_SLICE_NBYTES: Final = 64 << 10
_FREE_SLICE_NBYTES: Final = 1 << 20
_LEAST_FREE_NBYTES: Final = 256 << 10
"""Smallest payload to hash without the lock. For smaller ones, releasing it saves no time."""
_LONGEST_HELD_NBYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class PieceBuffers:
    """A piece: its first slot, and the memory and the checksum seed of each chunk."""

    first_slot: int
    views: Sequence[memoryview]
    seeds: Sequence[int]

    def singles(self) -> list[PieceBuffers]:
        """Split the piece into one piece per chunk."""
        return [
            PieceBuffers(self.first_slot + number, [view], [seed])
            for number, (view, seed) in enumerate(zip(self.views, self.seeds, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class MovedPiece:
    """Result of moving a piece, with one entry per chunk.

    Attributes:
        digests: Checksum of each chunk's bytes in memory.
        error: Message of the first failure; empty if there was none.
    """

    outcomes: Sequence[Outcome]
    digests: Sequence[int]
    error: str = ""

    def __add__(self, other: MovedPiece) -> MovedPiece:
        return MovedPiece(
            [*self.outcomes, *other.outcomes],
            [*self.digests, *other.digests],
            self.error or other.error,
        )


def read_piece(
    file: SlotFile, piece: PieceBuffers, checksums: Sequence[int], digest: Digest
) -> MovedPiece:
    """Read and verify a piece. An unreadable sector fails only its own chunk."""
    try:
        whole = file.read(piece.first_slot, piece.views)
    except OSError as error:
        if len(piece.views) == 1:
            return MovedPiece([Outcome.FAILED], [0], _message(error, piece))
        parts = [
            read_piece(file, single, [checksum], digest)
            for single, checksum in zip(piece.singles(), checksums, strict=True)
        ]
        return sum(parts, MovedPiece([], []))
    return _verify(piece, whole, checksums, digest)


def _verify(
    piece: PieceBuffers, whole: int, checksums: Sequence[int], digest: Digest
) -> MovedPiece:
    """Verify the first ``whole`` chunks of ``piece``; the others count as CORRUPT."""
    digests = [
        digest(view, seed)
        for view, seed in zip(piece.views[:whole], piece.seeds[:whole], strict=True)
    ]
    outcomes = [
        Outcome.DONE if found == stored else Outcome.CORRUPT
        for found, stored in zip(digests, checksums, strict=False)
    ]
    missing = len(piece.views) - whole
    outcomes += [Outcome.CORRUPT] * missing
    wrong = outcomes.index(Outcome.CORRUPT) if Outcome.CORRUPT in outcomes else None
    message = "" if wrong is None else f"slot {piece.first_slot + wrong}: checksum mismatch"
    return MovedPiece(outcomes, digests + [0] * missing, message)


def write_piece(file: SlotFile, piece: PieceBuffers, digest: Digest) -> MovedPiece:
    """Compute checksums and write a piece. A bad sector fails only its own chunk."""
    digests = [digest(view, seed) for view, seed in zip(piece.views, piece.seeds, strict=True)]
    try:
        file.write(piece.first_slot, piece.views)
    except OSError as error:
        if len(piece.views) == 1:
            return MovedPiece([Outcome.FAILED], digests, _message(error, piece))
        singles = (write_piece(file, single, digest) for single in piece.singles())
        return sum(singles, MovedPiece([], []))
    return MovedPiece([Outcome.DONE] * len(digests), digests)


def hash_key(key: bytes) -> int:
    """Return the 64-bit hash of ``key``; the hash seeds the checksum of the chunk's payload."""
    return xxhash.xxh3_64_intdigest(key)


def select_digest(*, alone: bool) -> Digest:
    """Return the faster of two equal checksum functions for this process.

    If ``alone``, no engine runs in this process. Then hashing may release the interpreter lock,
    because other threads hold the lock only briefly.
    """
    return _xxh3_alone if alone else _xxh3


def _message(error: OSError, piece: PieceBuffers) -> str:
    return f"slot {piece.first_slot}: {error.strerror or error}"


def _xxh3(payload: memoryview, seed: int) -> int:
    if not _HELD_SLICE_NBYTES < len(payload) <= _LONGEST_HELD_NBYTES:
        return xxhash.xxh3_64_intdigest(payload, seed=seed)
    return _in_slices(payload, seed, _HELD_SLICE_NBYTES)


def _xxh3_alone(payload: memoryview, seed: int) -> int:
    if len(payload) < _LEAST_FREE_NBYTES:
        return _xxh3(payload, seed)
    return _in_slices(payload, seed, _FREE_SLICE_NBYTES)


def _in_slices(payload: memoryview, seed: int, slice_nbytes: int) -> int:
    state = xxhash.xxh3_64(seed=seed)
    for start in range(0, len(payload), slice_nbytes):
        state.update(payload[start : start + slice_nbytes])
    return state.intdigest()
