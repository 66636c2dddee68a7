"""The rows of an index as arrays, for an engine that opens its cache.

Only engines use this module, which needs numpy. The commands for an index without an engine
work without numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.keys import GROUP_NBYTES, ChunkKey
from kvtier.tiers.slab.index import IndexDatabase
from kvtier.tiers.slab.piece_io import hash_key
from kvtier.tiers.slab.removals import GROUP_SHIFT, MARKED_NBYTES, PackedMarks, pack_marks
from kvtier.tiers.slab.schema import LATEST, IndexDamagedError, damage_raised

__all__ = ["KeyMarks", "StoredRows", "hash_keys", "load_rows", "mark_keys", "no_rows"]

KeyArray: TypeAlias = npt.NDArray[Any]
"""Keys as ``V<width>``, or as Python objects if the lengths differ."""

KeyMarks: TypeAlias = npt.NDArray[np.uint64]
"""Marks of keys for the removal log."""

_KEYS_PER_STEP: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The content of an index, least recently used first. Keys are unique.

    Attributes:
        keys: The chunks' keys; an array, because a million objects would fragment the heap.
        key_marks: Mark of each key for the removal log.
        outdated: Slots whose key has a newer row in another slot.
        clock: A logical time later than all times in the index.
        retained: For each slot with a protected chunk, the end of the protection from eviction,
            in seconds since the epoch.
    """

    keys: KeyArray
    slots: npt.NDArray[np.int64]
    key_hashes: npt.NDArray[np.uint64]
    key_marks: KeyMarks
    checksums: npt.NDArray[np.uint64]
    outdated: npt.NDArray[np.int64]
    clock: int
    retained: Mapping[int, int] = field(default_factory=dict)

    def packed_marks(self) -> PackedMarks:
        """Return the marks of all keys."""
        return self.key_marks.astype("<u8").tobytes()

    def __iter__(self) -> Iterator[tuple[ChunkKey, int]]:
        """Yield (key, slot) pairs, least recently used first."""
        for keys, slots in zip(_by_step(self.keys), _by_step(self.slots), strict=True):
            yield from zip(keys, slots, strict=True)


def load_rows(database: IndexDatabase, capacity_slots: int) -> StoredRows:
    """Return the rows of the first ``capacity_slots`` slots and delete all others.

    Raises:
        IndexDamagedError: The rows cannot be read.
    """
    with damage_raised():
        database.drop_beyond(capacity_slots)
        rows = _order(*_fetch(database, capacity_slots))
        return replace(rows, retained=database.retained())


def no_rows() -> StoredRows:
    """Return the content of an empty index."""
    return _order(_of_objects([]), np.empty((0, 4), dtype=np.int64))


def hash_keys(keys: Sequence[ChunkKey]) -> npt.NDArray[np.uint64]:
    """Return the 64-bit hash of each of ``keys``."""
    return np.fromiter(map(hash_key, keys), dtype=np.uint64, count=len(keys))


def mark_keys(keys: Sequence[ChunkKey]) -> KeyMarks:
    """Return the marks of ``keys``, as :func:`~kvtier.tiers.slab.removals.pack_marks` does."""
    lengths = set(map(len, keys))
    if len(lengths) != 1 or min(lengths) < MARKED_NBYTES:
        return np.frombuffer(pack_marks(keys), dtype="<u8").astype(np.uint64)
    # One engine's keys all have one length: a million of them take some 0.1 s.
    table = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(len(keys), -1)
    begins = np.ascontiguousarray(table[:, :MARKED_NBYTES]).view(">u8")
    groups = np.ascontiguousarray(table[:, -GROUP_NBYTES:]).view(">u4").astype(np.uint64)
    marks: KeyMarks = begins.astype(np.uint64) ^ groups << np.uint64(GROUP_SHIFT)
    return marks.ravel()


def _fetch(
    database: IndexDatabase, capacity_slots: int
) -> tuple[KeyArray, npt.NDArray[np.int64]]:
    """Return the keys of all rows, and their slots, checksums, generations and last uses."""
    keys: list[KeyArray] = []
    numbers = [np.empty((0, 4), dtype=np.int64)]
    for found in database.packed_rows(capacity_slots):
        keys.append(_decode_keys(found.keys, found.row_count))
        packed = np.frombuffer(bytes.fromhex(found.numbers), dtype=">i8")
        numbers.append(packed.reshape(-1, 4).astype(np.int64))
    if len({some.dtype for some in keys}) > 1:
        keys = [_of_objects(some.tolist()) for some in keys]
    return np.concatenate(keys or [_of_objects([])]), np.concatenate(numbers)


def _decode_keys(text: str, count: int) -> KeyArray:
    """Return ``count`` keys from comma-separated hexadecimal."""
    width, rest = divmod(len(text) + 1, count)
    if not rest and text[width - 1 :: width] == "," * (count - 1):
        return np.frombuffer(bytes.fromhex(text.replace(",", "")), dtype=f"V{width // 2}")
    return _of_objects([bytes.fromhex(key) for key in text.split(",")])


def _of_objects(keys: Sequence[ChunkKey]) -> KeyArray:
    """Return ``keys`` of different lengths as an array of Python objects."""
    array = np.empty(len(keys), dtype=np.object_)
    array[:] = keys
    return array


def _by_step(values: npt.NDArray[Any]) -> Iterator[list[Any]]:
    """Yield ``values`` as lists of Python objects, in batches."""
    for first in range(0, len(values), _KEYS_PER_STEP):
        yield values[first : first + _KEYS_PER_STEP].tolist()


def _order(keys: KeyArray, numbers: npt.NDArray[np.int64]) -> StoredRows:
    """Sort rows by last use and keep the newest row of each key.

    Keys are compared by 64-bit hash. A collision loses one chunk but never serves wrong bytes.
    """
    if len(numbers) != len(keys):
        raise IndexDamagedError("its columns differ in length")
    slots, checksums, generations, last_uses = np.ascontiguousarray(numbers.T)
    key_hashes = np.concatenate([hash_keys(()), *map(hash_keys, _by_step(keys))])
    by_key = np.lexsort((generations, key_hashes))
    newest = np.ones(len(keys), dtype=np.bool_)
    newest[:-1] = key_hashes[by_key][1:] != key_hashes[by_key][:-1]
    kept = by_key[newest]
    kept = kept[np.argsort(last_uses[kept], kind="stable")]
    kept_keys = keys[kept]
    if (latest := max(generations.max(initial=0), last_uses.max(initial=0))) > LATEST:
        raise IndexDamagedError(f"its clock value {latest} is out of range")
    return StoredRows(
        keys=kept_keys,
        slots=slots[kept],
        key_hashes=key_hashes[kept],
        key_marks=np.concatenate([mark_keys(()), *map(mark_keys, _by_step(kept_keys))]),
        checksums=checksums[kept].view(np.uint64),
        outdated=slots[by_key[~newest]],
        clock=int(latest) + 1,
    )
