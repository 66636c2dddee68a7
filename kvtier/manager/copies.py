"""Lists of chunk copies, and the order of the chunks of one prompt.

A *copy* (``ChunkCopy``) is one chunk in one tier.

A prefix is useful only up to its first missing chunk in any KV cache group. So the deepest
chunks of a request should be evicted first, and all groups should lose chunks evenly.

For each request, an engine lists the chunks of one KV cache group after another, each from root
to leaf. *Prompt order* merges the groups: all chunks from root to leaf.

Groups may have chunks of different lengths. The functions of this module assume that the chunks
of every group cover the same tokens. So a chunk's relative position in its group (``i`` of
``n``) gives the token where the chunk ends.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from kvtier.keys import ChunkKey, group_part, is_single_group
from kvtier.policies import ChunkCopy

__all__ = [
    "CopyList",
    "by_group",
    "link",
    "nearest_to_root",
    "prompt_order",
    "split_prompts",
    "without",
]

_key_of = operator.attrgetter("key")
_parent_of = operator.attrgetter("parent")


class CopyList(NamedTuple):
    """Copies in one tier that are handled together, such as the copies of one request.

    The object also has lists of the keys and slots, because reading these from each copy is
    slow. The lists are never changed.

    Attributes:
        copies: The copies.
        keys: Key of each copy.
        slots: Slot of each copy.
        drops: Value of :attr:`TierState.drops` when the list was made.
    """

    copies: Sequence[ChunkCopy]
    keys: Sequence[ChunkKey]
    slots: Sequence[int]
    drops: int

    def part(self, copies: Sequence[ChunkCopy]) -> CopyList:
        """Return a :class:`CopyList` of ``copies``, a subsequence of this list's copies."""
        if copies == self.copies:
            return self
        keys = [copy.key for copy in copies]
        return CopyList(copies, keys, [copy.slot for copy in copies], self.drops)

    def between(self, begin: int, end: int | None = None) -> CopyList:
        """Return the copies at positions ``begin`` to ``end - 1``."""
        part = slice(begin, end)
        return CopyList(self.copies[part], self.keys[part], self.slots[part], self.drops)

    def cut(self, chunks: int) -> tuple[CopyList, CopyList]:
        """Split the list after ``chunks`` copies; return both lists."""
        return self.between(0, chunks), self.between(chunks)

    def head(self, chunks: int) -> CopyList:
        """Return the ``chunks`` copies that are nearest to the root of their prompt."""
        return self.part([self.copies[at] for at in nearest_to_root(self.keys, chunks)])

    @staticmethod
    def join(lists: Sequence[CopyList]) -> CopyList:
        """Return the concatenation of ``lists``, which must have at least one list."""
        if len(lists) == 1:
            return lists[0]
        return CopyList(
            [copy for listed in lists for copy in listed.copies],
            [key for listed in lists for key in listed.keys],
            [slot for listed in lists for slot in listed.slots],
            min(listed.drops for listed in lists),
        )


def without(copies: Sequence[ChunkCopy], some: Sequence[ChunkCopy]) -> Sequence[ChunkCopy]:
    """Return the ``copies`` that are not in ``some``, which must be a subset of ``copies``."""
    if len(some) == len(copies):
        return ()
    if not some:
        return copies
    excluded = set(some)
    return [copy for copy in copies if copy not in excluded]


def by_group(copies: Sequence[ChunkCopy]) -> list[Sequence[ChunkCopy]]:
    """Split ``copies``, which must be sorted by group, into one sequence per group."""
    parts: list[Sequence[ChunkCopy]] = []
    begin = 0
    while begin < len(copies):
        group = group_part(copies[begin].key)
        end = bisect_right(copies, 0, begin, key=lambda copy: not copy.key.endswith(group))
        parts.append(copies[begin:end])
        begin = end
    return parts


def prompt_order(copies: Sequence[ChunkCopy]) -> Sequence[ChunkCopy]:
    """Return the copies of one prompt from root to leaf, with all KV cache groups merged.

    Args:
        copies: Sorted by group, and within a group from root to leaf.
    """
    if not copies or is_single_group((copies[0].key, copies[-1].key)):
        return copies
    return _merge(by_group(copies))


def nearest_to_root(keys: Sequence[ChunkKey], count: int) -> Sequence[int]:
    """Return the sorted positions of the ``count`` keys that are closest to the prompt's root.

    Args:
        keys: Keys of one prompt, sorted by group, and within a group from root to leaf.
        count: At most the number of keys.
    """
    if is_single_group(keys):
        return range(count)
    groups = Counter(map(group_part, keys))
    ends = [at / chunks for chunks in groups.values() for at in range(1, chunks + 1)]
    return sorted(sorted(range(len(keys)), key=ends.__getitem__)[:count])


def link(copies: Sequence[ChunkCopy]) -> None:
    """Set the missing parents and depths of one prompt's copies.

    Recovered copies lack both. With them, policies keep the chunks of a prompt together. If a
    chunk is missing between two copies, the depths are too small by one from there on.

    Args:
        copies: Copies of one prompt: sorted by group, and within a group from root to leaf.
    """
    for before, copy in pairwise(copies):
        if copy.parent is None and group_part(copy.key) == group_part(before.key):
            copy.parent = before.key
            copy.depth = before.depth + 1


def split_prompts(copies: Sequence[ChunkCopy]) -> list[Sequence[ChunkCopy]]:
    """Split ``copies`` into one sequence per prompt, each in prompt order.

    Chunks after a gap count as a new prompt.

    Args:
        copies: Sorted by prompt, then by group, then from root to leaf.
    """
    if not copies:
        return []
    first, last = copies[0], copies[-1]
    if last.depth - first.depth == len(copies) - 1 and is_single_group((first.key, last.key)):
        return [copies]
    follows = map(operator.eq, map(_key_of, copies), map(_parent_of, copies[1:]))
    cuts = [at for at, is_next in enumerate(follows, 1) if not is_next]
    prompts: list[Sequence[ChunkCopy]] = []
    parts: list[Sequence[ChunkCopy]] = []
    for begin, end in pairwise([0, *cuts, len(copies)]):
        part = copies[begin:end]
        if parts and group_part(part[0].key) <= group_part(parts[-1][0].key):
            prompts.append(_merge(parts))
            parts = []
        parts.append(part)
    prompts.append(_merge(parts))
    return prompts


def _merge(parts: Sequence[Sequence[ChunkCopy]]) -> Sequence[ChunkCopy]:
    """Merge the copies of several groups, ordered by the token where each chunk ends.

    Args:
        parts: The copies of each group; all groups cover the same tokens.
    """
    if len(parts) == 1:
        return parts[0]
    merged = list(chain.from_iterable(parts))
    if len(set(map(len, parts))) == 1:
        for at, part in enumerate(parts):
            merged[at :: len(parts)] = part
        return merged
    ends = [at / len(part) for part in parts for at in range(1, len(part) + 1)]
    return [merged[at] for at in sorted(range(len(merged)), key=ends.__getitem__)]
