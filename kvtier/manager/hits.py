"""Finds the longest prefix of a prompt that every KV cache group can load.

A model's layers form KV cache groups. Each kind of group needs different chunks of a prefix
that ends at token ``end``:

==========  ======================================================================
reach       chunks that a group needs
==========  ======================================================================
``PREFIX``  all chunks: full attention reads the whole prefix
``WINDOW``  those of the last ``window_tokens - 1`` tokens: a sliding window
``LOCAL``   those since the last multiple of ``window_tokens``: chunked local attention
``STATE``   the chunk that ends at ``end``: recurrent layers have one state
==========  ======================================================================

A hit ends where a chunk of every group ends, as in vLLM's own prefix cache: at a multiple of
the least common multiple of the groups' chunk lengths. A prefix shorter than this least common
multiple is a miss. The search only shortens the prefix. First the prefix is cut at the first
missing chunk of each ``PREFIX`` group. Then the groups of the other kinds are checked. If such
a group lacks a needed chunk, the prefix is cut at the start of that chunk, and these groups are
checked again. So there are at most as many rounds as chunks.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvtier.keys import ChunkKey

__all__ = ["GroupReach", "HitRules", "Presence", "Prompt", "Reach"]


class Reach(enum.Enum):
    """Which chunks of a prefix the layers of a KV cache group read."""

    PREFIX = "prefix"
    WINDOW = "window"
    LOCAL = "local"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class GroupReach:
    """The part of a prefix that a hit needs in one KV cache group.

    Attributes:
        chunk_tokens: Number of tokens of a chunk.
        reach: The chunks that the group's layers read.
        window_tokens: Number of tokens of the sliding window, or of a chunk of local attention,
            including the current token.
    """

    chunk_tokens: int
    reach: Reach = Reach.PREFIX
    window_tokens: int = 0

    def first_token(self, end: int) -> int:
        """Return the first token that the group reads in a prefix of ``end`` tokens."""
        if self.reach is Reach.PREFIX:
            return 0
        if self.reach is Reach.STATE:
            return end - self.chunk_tokens
        if self.reach is Reach.LOCAL:
            return end - end % self.window_tokens
        return max(end - self.window_tokens + 1, 0)


class Prompt(NamedTuple):
    """The chunks that a request may load.

    Attributes:
        keys: Keys of the prompt's whole chunks, per group, root to leaf.
        local_tokens: Number of tokens in the engine's own prefix cache.
        limit_tokens: Number of tokens of the longest useful prefix.
    """

    keys: Sequence[Sequence[ChunkKey]]
    local_tokens: int
    limit_tokens: int


class Presence(Protocol):
    """Reports which chunks can be loaded."""

    def lead(self, keys: Sequence[ChunkKey]) -> int:
        """Return the number of leading ``keys`` that can be loaded."""

    def has(self, key: ChunkKey) -> bool:
        """Return whether ``key`` can be loaded."""


class HitRules:
    """Finds the longest hit for the KV cache groups of one engine.

    Args:
        groups: The groups, in the order of :attr:`Prompt.keys`.

    Attributes:
        groups: The groups.
        alignment_tokens: Every hit ends at a multiple of this number of tokens.
    """

    def __init__(self, groups: Sequence[GroupReach]) -> None:
        self.groups = tuple(groups)
        self.alignment_tokens = math.lcm(*(group.chunk_tokens for group in groups))
        self._prefixes = self._select(is_prefix=True)
        self._others = self._select(is_prefix=False)

    def _select(self, *, is_prefix: bool) -> list[tuple[int, GroupReach]]:
        return [
            (number, group)
            for number, group in enumerate(self.groups)
            if (group.reach is Reach.PREFIX) == is_prefix
        ]

    def longest(self, prompt: Prompt, presence: Presence) -> int:
        """Return the end of the longest hit in tokens; ``prompt.local_tokens`` for a miss."""
        local, end = prompt.local_tokens, prompt.limit_tokens
        for number, group in self._prefixes:
            size, keys = group.chunk_tokens, prompt.keys[number]
            first = local // size
            end = min(end, (first + presence.lead(keys[first : end // size])) * size)
        end -= end % self.alignment_tokens
        while end - local >= self.alignment_tokens:
            missing = self._missing_before(end, prompt, presence)
            if missing is None:
                return end
            end = missing - missing % self.alignment_tokens
        return local

    def needed(self, prompt: Prompt, end: int) -> list[ChunkKey]:
        """Return the keys of the chunks to load for a hit of ``end`` tokens, group by group."""
        local = prompt.local_tokens
        needed: list[ChunkKey] = []
        for group, keys in zip(self.groups, prompt.keys, strict=True):
            size = group.chunk_tokens
            first = max(group.first_token(end), local) // size
            needed += keys[first : end // size]
        return needed

    def _missing_before(self, end: int, prompt: Prompt, presence: Presence) -> int | None:
        """Return the first token of a needed chunk that is missing; None if there is none."""
        for number, group in self._others:
            size, keys = group.chunk_tokens, prompt.keys[number]
            last = end // size
            if last > len(keys):
                return len(keys) * size
            first = max(group.first_token(end), prompt.local_tokens) // size
            for chunk in range(last - 1, first - 1, -1):
                if not presence.has(keys[chunk]):
                    return chunk * size
        return None
