"""Payloads that can be told apart, and memory to put them in."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Sequence

from kvtier.keys import ChunkKey, make_key
from kvtier.os.memory import open_anonymous
from kvtier.types import SharedMemory

__all__ = ["Arena", "make_buffers", "make_keys", "make_payload", "make_sources"]


def make_keys(numbers: Sequence[int]) -> list[ChunkKey]:
    """Return a key per number, shaped like an engine's."""
    return [make_key(random.Random(number).randbytes(32), 0) for number in numbers]


def make_payload(key: ChunkKey, nbytes: int) -> bytes:
    """Return the one content of the chunk ``key`` names."""
    return random.Random(key).randbytes(nbytes)


class Arena:
    """Memory for buffers that another process may map too; given out once, never taken back.

    Args:
        nbytes: Bytes it may give out. Only what is used takes memory.
    """

    def __init__(self, nbytes: int = 1 << 30) -> None:
        self._descriptor = open_anonymous("kvtier-arena")
        os.ftruncate(self._descriptor, nbytes)
        self._view = memoryview(mmap.mmap(self._descriptor, nbytes))
        self._used_nbytes = 0

    @property
    def shared(self) -> SharedMemory:
        """The memory, for a :class:`~kvtier.tiers.base.TierContext`."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._view))
        return SharedMemory(self._descriptor, address, self._view.nbytes)

    def take(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` zeroed bytes at a page boundary."""
        start = self._used_nbytes
        self._used_nbytes += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return self._view[start : start + nbytes]

    def close(self) -> None:
        """Give the memory back, once the last view onto it is gone."""
        os.close(self._descriptor)
        self._view.release()


def make_buffers(count: int, nbytes: int, arena: Arena | None = None) -> list[memoryview]:
    """Return ``count`` page-aligned, zeroed buffers, neighbours in one mapping."""
    if count == 0:
        return []
    if arena is None:
        whole = memoryview(mmap.mmap(-1, count * nbytes))
    else:
        whole = arena.take(count * nbytes)
    return [whole[start : start + nbytes] for start in range(0, count * nbytes, nbytes)]


def make_sources(
    keys: Sequence[ChunkKey], nbytes: int, arena: Arena | None = None
) -> list[memoryview]:
    """Return page-aligned buffers that hold the payloads of ``keys``."""
    buffers = make_buffers(len(keys), nbytes, arena)
    for key, buffer in zip(keys, buffers, strict=True):
        buffer[:] = make_payload(key, nbytes)
    return buffers
