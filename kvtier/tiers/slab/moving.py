"""Moving one piece between its slots and memory; runs on a thread of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.tiers.slab.checksum import Digest
from kvtier.tiers.slab.slots import SlotFile
from kvtier.types import Outcome

__all__ = ["Moved", "PieceBuffers", "read_piece", "write_piece"]


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of the chunks of a piece, in its order.

    Attributes:
        outcomes: One per chunk.
        digests: Checksum of each chunk's bytes as they were in memory.
        error: The first failure in words; empty if there is none.
    """

    outcomes: Sequence[Outcome]
    digests: Sequence[int]
    error: str = ""

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            [*self.outcomes, *other.outcomes],
            [*self.digests, *other.digests],
            self.error or other.error,
        )


@dataclass(frozen=True, slots=True)
class PieceBuffers:
    """A piece as the I/O sees it, without keys and positions.

    Attributes:
        first_slot: Slot of the first chunk.
        views: Memory of each chunk.
        seeds: Seed of each chunk's checksum.
    """

    first_slot: int
    views: Sequence[memoryview]
    seeds: Sequence[int]

    def singles(self) -> list[PieceBuffers]:
        """Return each chunk as a piece of its own."""
        return [
            PieceBuffers(self.first_slot + number, [view], [seed])
            for number, (view, seed) in enumerate(zip(self.views, self.seeds, strict=True))
        ]


def read_piece(
    file: SlotFile, piece: PieceBuffers, checksums: Sequence[int], digest: Digest
) -> Moved:
    """Read and verify; an unreadable sector fails only the chunk it is in."""
    try:
        whole = file.read(piece.first_slot, piece.views)
    except OSError as error:
        if len(piece.views) == 1:
            return Moved([Outcome.FAILED], [0], _words(error, piece))
        parts = [
            read_piece(file, single, [checksum], digest)
            for single, checksum in zip(piece.singles(), checksums, strict=True)
        ]
        return sum(parts, Moved([], []))
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
    words = "" if wrong is None else f"slot {piece.first_slot + wrong}: not the bytes stored"
    return Moved(outcomes, digests + [0] * missing, words)


def write_piece(file: SlotFile, piece: PieceBuffers, digest: Digest) -> Moved:
    """Checksum and write; a sector that takes no bytes fails only the chunk it is in."""
    digests = [digest(view, seed) for view, seed in zip(piece.views, piece.seeds, strict=True)]
    try:
        file.write(piece.first_slot, piece.views)
    except OSError as error:
        if len(piece.views) == 1:
            return Moved([Outcome.FAILED], digests, _words(error, piece))
        return sum(
            (write_piece(file, single, digest) for single in piece.singles()), Moved([], [])
        )
    return Moved([Outcome.DONE] * len(digests), digests)


def _words(error: OSError, piece: PieceBuffers) -> str:
    return f"slot {piece.first_slot}: {error.strerror or error}"
