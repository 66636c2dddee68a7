"""Checksums of slots, and what computing them costs the rest of the process.

xxhash lets go of the interpreter lock for buffers beyond some 64 KiB. That is a bad bargain
here: a slot takes tens of microseconds to hash, and beside a busy engine thread getting the
lock back takes the switch interval, 5 ms, so hashing a 256 KiB slot would take 300 times longer
than it needs. In the engine's process slots are therefore hashed in slices small enough to keep
the lock, at the price of holding it for less than a millisecond per piece.

In a process of its own nobody computes beside a tier but its other threads, which hash and wait
for the disk. There large slots go in large slices: a seventh less time to hash 2 MiB, for
memory is read best in long stretches, and there are fewer slices to cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import xxhash

__all__ = ["Digest", "hash_key", "select_digest"]

Digest = Callable[[memoryview, int], int]
"""Slot bytes and seed -> unsigned 64-bit checksum."""

_HELD_SLICE_NBYTES: Final = 64 << 10
_FREE_SLICE_NBYTES: Final = 1 << 20
_LEAST_FREE_NBYTES: Final = 256 << 10
"""Below, giving up the lock costs as much as it saves."""
_LONGEST_HELD_NBYTES: Final = 8 << 20


def hash_key(key: bytes) -> int:
    """Return 64 bits that stand for ``key``: the seed of its payload's checksum."""
    return xxhash.xxh3_64_intdigest(key)


def select_digest(checksum: Literal["xxh3", "off"], *, alone: bool) -> Digest:
    """Return the function that computes what the index stores as checksum.

    Args:
        checksum: Which checksum.
        alone: Whether no thread of this process computes in Python for long.
    """
    if checksum == "off":
        return _off
    return _xxh3_alone if alone else _xxh3


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


def _off(payload: memoryview, seed: int) -> int:  # noqa: ARG001 - a Digest
    return 0
