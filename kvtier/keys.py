"""Chunk keys: the engine's block hash followed by a 4-byte big-endian KV cache group index."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Final

__all__ = [
    "ADAPTER_NBYTES",
    "ADAPTER_OFFSET",
    "GROUP_NBYTES",
    "ChunkKey",
    "counting_group",
    "group_filter",
    "group_of",
    "group_part",
    "hash_part",
    "is_single_group",
    "make_key",
    "short_key",
    "strip_adapter",
]

ChunkKey = bytes
"""Identifies a chunk's content: equal keys mean equal bytes."""

GROUP_NBYTES = 4

hash_part: Final[Callable[[ChunkKey], bytes]] = operator.itemgetter(slice(-GROUP_NBYTES))
"""Returns the block hash of a key: the key without its group.

>>> hash_part(make_key(b"abc", 1))
b'abc'
"""
group_part: Final[Callable[[ChunkKey], bytes]] = operator.itemgetter(slice(-GROUP_NBYTES, None))
"""Returns the bytes of a key that encode its group, faster than :func:`group_of`.

>>> group_part(make_key(b"abc", 1)).hex()
'00000001'
"""

ADAPTER_NBYTES = 15
"""Bytes of the LoRA adapter's digest in a key.

This number is odd, and the engine's keys have an even length. So a key's length tells whether
the key has a digest.
"""
ADAPTER_OFFSET = 8
"""Offset of the digest in a key: after the bytes that :func:`short_key` shows."""


def make_key(block_hash: bytes, group: int) -> ChunkKey:
    """Return the key of the chunk whose last block has the hash ``block_hash``.

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


def group_filter(group: int) -> Callable[[ChunkKey], bool]:
    """Return a predicate that tests whether a key belongs to KV cache group ``group``.

    The predicate runs in C, so it is fast.

    >>> list(map(group_filter(1), [make_key(b"a", 1), make_key(b"a", 0)]))
    [True, False]
    """
    return operator.methodcaller("endswith", make_key(b"", group))


def counting_group(reads_all: Mapping[int, bool]) -> int:
    """Return the index of the *counting group*, in which prompt tokens are counted.

    All groups have chunks of the same tokens, so only one group is counted. The counting group
    is the first group whose layers read the whole prefix; without such a group, it is the first
    group.

    Args:
        reads_all: For each group index, whether the group's layers read the whole prefix.

    >>> counting_group({1: False, 3: True, 4: True})
    3
    >>> counting_group({1: False, 3: False})
    1
    """
    return min((group for group, all_of in reads_all.items() if all_of), default=min(reads_all))


def is_single_group(keys: Sequence[ChunkKey]) -> bool:
    """Return whether ``keys``, sorted by group, belong to one KV cache group.

    The function compares only the first and the last key, because every load and store calls
    it.

    >>> is_single_group([make_key(b"a", 3), make_key(b"b", 3)])
    True
    >>> is_single_group([make_key(b"a", 3), make_key(b"b", 2)])
    False
    """
    return keys[0][-GROUP_NBYTES:] == keys[-1][-GROUP_NBYTES:]


def short_key(key: ChunkKey) -> str:
    """Return ``key`` in a short form, for log lines.

    >>> short_key(make_key(bytes(range(16)), 2))
    '0001020304050607/2'
    """
    return f"{key[:8].hex()}/{group_of(key)}"


def strip_adapter(key: ChunkKey) -> bytes:
    """Return ``key`` without its adapter digest, in the form that the engine uses.

    >>> key = bytes(range(36))
    >>> own = key[:ADAPTER_OFFSET] + b"." * ADAPTER_NBYTES + key[ADAPTER_OFFSET:]
    >>> strip_adapter(own) == strip_adapter(key) == key
    True
    """
    if len(key) % 2:
        return key[:ADAPTER_OFFSET] + key[ADAPTER_OFFSET + ADAPTER_NBYTES :]
    return key
