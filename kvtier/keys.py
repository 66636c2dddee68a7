"""Chunk keys: the engine's block hash followed by a 4-byte big-endian KV cache group index."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Final

__all__ = [
    "GROUP_NBYTES",
    "ChunkKey",
    "group_of",
    "is_of_first_group",
    "make_key",
    "of_one_group",
    "short",
]

ChunkKey = bytes
"""Names a chunk's content: equal keys mean equal bytes, whoever computed them."""

GROUP_NBYTES = 4


def make_key(block_hash: bytes, group: int) -> ChunkKey:
    """Build the key of the chunk whose last block hashes to ``block_hash``.

    >>> make_key(b"abc", 1).hex()
    '61626300000001'
    """
    return block_hash + group.to_bytes(GROUP_NBYTES, "big")


def group_of(key: ChunkKey) -> int:
    """Return the KV cache group index of ``key``.

    >>> group_of(make_key(b"abc", 258))
    258
    """
    return int.from_bytes(key[-GROUP_NBYTES:], "big")


is_of_first_group: Final[Callable[[ChunkKey], bool]] = operator.methodcaller(
    "endswith", make_key(b"", 0)
)
"""Whether a key is of KV cache group 0; no Python runs per key."""


def of_one_group(keys: Sequence[ChunkKey]) -> bool:
    """Return whether all ``keys``, which stand group by group, are of one KV cache group.

    Only the first and the last are looked at, for this is asked at every load and store of any
    length. Both scheduler halves hand over keys group by group. Were they mixed, figures and
    the order of eviction would be wrong; what a key stands for is in the key, so no bytes.

    >>> of_one_group([make_key(b"a", 3), make_key(b"b", 3)])
    True
    >>> of_one_group([make_key(b"a", 3), make_key(b"b", 2)])
    False
    """
    return keys[0][-GROUP_NBYTES:] == keys[-1][-GROUP_NBYTES:]


def short(key: ChunkKey) -> str:
    """Return a form of ``key`` short enough for a log line.

    >>> short(make_key(bytes(range(16)), 2))
    '0001020304050607/2'
    """
    return f"{key[:8].hex()}/{group_of(key)}"
