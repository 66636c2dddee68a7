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

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from kvtier.keys import GROUP_NBYTES, of_one_group
from kvtier.policies import ChunkCopy

__all__ = ["across_groups", "by_group", "prompts_of"]

_Item = TypeVar("_Item")


def by_group(copies: Sequence[ChunkCopy]) -> list[Sequence[ChunkCopy]]:
    """Return the copies of each KV cache group; they stand group after group."""
    groups = [copy.key[-GROUP_NBYTES:] for copy in copies]
    return _cut(copies, [before != group for before, group in pairwise(groups)])


def across_groups(copies: Sequence[ChunkCopy]) -> Sequence[ChunkCopy]:
    """Return the copies of one prompt root to leaf across its KV cache groups.

    Args:
        copies: Group after group, each root to leaf.
    """
    if not copies or of_one_group((copies[0].key, copies[-1].key)):
        return copies
    return _merge(by_group(copies))


def prompts_of(copies: Sequence[ChunkCopy]) -> list[Sequence[ChunkCopy]]:
    """Return the copies of each prompt, root to leaf across its KV cache groups.

    Chunks behind a gap are a prompt of their own.

    Args:
        copies: Prompt after prompt; of each group after group, and of those root to leaf.
    """
    if not copies:
        return []
    first, last = copies[0], copies[-1]
    if last.depth - first.depth == len(copies) - 1 and of_one_group((first.key, last.key)):
        return [copies]
    breaks = [before.key != copy.parent for before, copy in pairwise(copies)]
    prompts: list[Sequence[ChunkCopy]] = []
    parts: list[Sequence[ChunkCopy]] = []
    for part in _cut(copies, breaks):
        if parts and part[0].key[-GROUP_NBYTES:] <= parts[-1][0].key[-GROUP_NBYTES:]:
            prompts.append(_merge(parts))
            parts = []
        parts.append(part)
    prompts.append(_merge(parts))
    return prompts


def _cut(copies: Sequence[_Item], breaks: Sequence[bool]) -> list[Sequence[_Item]]:
    """Cut ``copies`` before each but the first where ``breaks`` says so."""
    cuts = [at for at, is_break in enumerate(breaks, 1) if is_break]
    return [copies[begin:end] for begin, end in pairwise([0, *cuts, len(copies)])]


def _merge(parts: Sequence[Sequence[_Item]]) -> Sequence[_Item]:
    """Return the items of all ``parts``, each of which covers the same tokens, by their end."""
    if len(parts) == 1:
        return parts[0]
    if len({len(part) for part in parts}) == 1:
        return [item for items in zip(*parts, strict=True) for item in items]
    items = [item for part in parts for item in part]
    ends = [at / len(part) for part in parts for at in range(1, len(part) + 1)]
    return [items[at] for at in sorted(range(len(items)), key=ends.__getitem__)]
