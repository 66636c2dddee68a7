"""Payloads that can be told apart, and memory to put them in."""

from __future__ import annotations

import mmap
import random
from collections.abc import Sequence

from kvtier.keys import ChunkKey, make_key

__all__ = ["make_buffers", "make_keys", "make_payload", "make_sources"]


def make_keys(numbers: Sequence[int]) -> list[ChunkKey]:
    """Return a key per number, shaped like an engine's."""
    return [make_key(random.Random(number).randbytes(32), 0) for number in numbers]


def make_payload(key: ChunkKey, nbytes: int) -> bytes:
    """Return the one content of the chunk ``key`` names."""
    return random.Random(key).randbytes(nbytes)


def make_buffers(count: int, nbytes: int) -> list[memoryview]:
    """Return ``count`` page-aligned, zeroed buffers, neighbours in one mapping."""
    if count == 0:
        return []
    whole = memoryview(mmap.mmap(-1, count * nbytes))
    return [whole[start : start + nbytes] for start in range(0, count * nbytes, nbytes)]


def make_sources(keys: Sequence[ChunkKey], nbytes: int) -> list[memoryview]:
    """Return page-aligned buffers that hold the payloads of ``keys``."""
    buffers = make_buffers(len(keys), nbytes)
    for key, buffer in zip(keys, buffers, strict=True):
        buffer[:] = make_payload(key, nbytes)
    return buffers
