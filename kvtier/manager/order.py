"""The order of chunks that one request brings or uses together.

A prefix is of use only as far as it is whole: in every KV cache group, and from its root on. So
of what a request stored or used at once the deepest chunk should leave first, and all groups
should become shorter together. Engines name the chunks of a request group after group, each
root to leaf. Here they are put root to leaf *across* the groups; eviction policies are then
told of them in the opposite direction.

Groups may have chunks of different lengths. What is named together covers the same tokens, so
a chunk's place in its group, as a share of what is named of the group, tells where it ends.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise

from kvtier.keys import GROUP_NBYTES, ChunkKey, is_single_group
from kvtier.policies import ChunkCopy

__all__ = ["across_groups", "by_group", "nearest", "prompts_of"]

_key_of = operator.attrgetter("key")
_parent_of = operator.attrgetter("parent")


def by_group(copies: Sequence[ChunkCopy]) -> list[Sequence[ChunkCopy]]:
    """Return the copies of each KV cache group; they stand group after group."""
    parts: list[Sequence[ChunkCopy]] = []
    begin = 0
    while begin < len(copies):
        group = copies[begin].key[-GROUP_NBYTES:]
        end = bisect_right(copies, 0, begin, key=lambda copy: not copy.key.endswith(group))
        parts.append(copies[begin:end])
        begin = end
    return parts


def across_groups(copies: Sequence[ChunkCopy]) -> Sequence[ChunkCopy]:
    """Return the copies of one prompt root to leaf across its KV cache groups.

    Args:
        copies: Group after group, each root to leaf.
    """
    if not copies or _is_of_one_group(copies):
        return copies
    return _merge(by_group(copies))


def nearest(keys: Sequence[ChunkKey], count: int) -> Sequence[int]:
    """Return which ``count`` of one prompt's ``keys`` are nearest to the root, ascending.

    Args:
        keys: Group after group, each root to leaf.
        count: At most their number.
    """
    if is_single_group(keys):
        return range(count)
    groups = Counter(key[-GROUP_NBYTES:] for key in keys)
    ends = [at / chunks for chunks in groups.values() for at in range(1, chunks + 1)]
    return sorted(sorted(range(len(keys)), key=ends.__getitem__)[:count])


def prompts_of(copies: Sequence[ChunkCopy]) -> list[Sequence[ChunkCopy]]:
    """Return the copies of each prompt, root to leaf across its KV cache groups.

    Chunks behind a gap are a prompt of their own.

    Args:
        copies: Prompt after prompt; of each group after group, and of those root to leaf.
    """
    if not copies:
        return []
    first, last = copies[0], copies[-1]
    if last.depth - first.depth == len(copies) - 1 and _is_of_one_group(copies):
        return [copies]
    follows = map(operator.eq, map(_key_of, copies), map(_parent_of, copies[1:]))
    cuts = [at for at, is_next in enumerate(follows, 1) if not is_next]
    prompts: list[Sequence[ChunkCopy]] = []
    parts: list[Sequence[ChunkCopy]] = []
    for begin, end in pairwise([0, *cuts, len(copies)]):
        part = copies[begin:end]
        if parts and part[0].key[-GROUP_NBYTES:] <= parts[-1][0].key[-GROUP_NBYTES:]:
            prompts.append(_merge(parts))
            parts = []
        parts.append(part)
    prompts.append(_merge(parts))
    return prompts


def _is_of_one_group(copies: Sequence[ChunkCopy]) -> bool:
    return copies[0].key[-GROUP_NBYTES:] == copies[-1].key[-GROUP_NBYTES:]


def _merge(parts: Sequence[Sequence[ChunkCopy]]) -> Sequence[ChunkCopy]:
    """Return the copies of all ``parts``, which cover the same tokens, by where they end."""
    if len(parts) == 1:
        return parts[0]
    merged = list(chain.from_iterable(parts))
    if len(set(map(len, parts))) == 1:
        for at, part in enumerate(parts):
            merged[at :: len(parts)] = part
        return merged
    ends = [at / len(part) for part in parts for at in range(1, len(part) + 1)]
    return [merged[at] for at in sorted(range(len(merged)), key=ends.__getitem__)]
