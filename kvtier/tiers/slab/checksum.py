"""Checksums of slots, and what computing them costs the rest of the process.

xxhash lets go of the interpreter lock for buffers beyond some 64 KiB. That is a bad bargain
here: a slot takes tens of microseconds to hash, and beside a busy engine thread getting the
lock back takes the switch interval, 5 ms, so hashing a 256 KiB slot would take 300 times longer
than it needs. Slots are therefore hashed in slices small enough to keep the lock, at the price
of holding it for less than a millisecond per piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import xxhash

__all__ = ["Digest", "hash_key", "select_digest"]

Digest = Callable[[memoryview, int], int]
"""Slot bytes and seed -> unsigned 64-bit checksum."""

_SLICE_NBYTES: Final = 64 << 10
_LONGEST_HELD_NBYTES: Final = 8 << 20


def hash_key(key: bytes) -> int:
    """Return 64 bits that stand for ``key``: the seed of its payload's checksum."""
    return xxhash.xxh3_64_intdigest(key)


def select_digest(checksum: Literal["xxh3", "off"]) -> Digest:
    """Return the function that computes what the index stores as checksum."""
    return _xxh3 if checksum == "xxh3" else _off


def _xxh3(payload: memoryview, seed: int) -> int:
    if not _SLICE_NBYTES < len(payload) <= _LONGEST_HELD_NBYTES:
        return xxhash.xxh3_64_intdigest(payload, seed=seed)
    state = xxhash.xxh3_64(seed=seed)
    for start in range(0, len(payload), _SLICE_NBYTES):
        state.update(payload[start : start + _SLICE_NBYTES])
    return state.intdigest()


def _off(payload: memoryview, seed: int) -> int:  # noqa: ARG001 - a Digest
    return 0
