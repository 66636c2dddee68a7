"""Simulates one tier for a model with several KV cache groups.

Each chunk of a trace stands for one chunk of each group. All groups have chunks of the same
length, and every chunk takes one slot. The rules are those of a live engine:

* :class:`~kvtier.manager.hits.HitRules` finds the hit. The request loads the chunks that the
  hit needs, so chunks before a window are not touched.
* The request computes the rest of its prompt. A group of full attention stores all these
  chunks. The other groups store only the chunks that are needed before a *boundary*, where a
  later hit can end. With vLLM's default retention there are two boundaries: the last whole
  chunk of the prompt, and the end of a prefix that is shared with another request.
* A policy gets the loads of a prompt as one batch and the stores as another, with all groups
  merged by depth. A prompt never evicts the chunks that it uses.

An engine finds a shared prefix in the GPU's cache, which is not simulated. Instead, the shared
prefix is the part of the prompt that the full attention groups have in the tier.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey
from kvtier.manager import GroupReach, HitRules, Prompt, Reach
from kvtier.policies.base import (
    ChunkCopy,
    CopyState,
    Eviction,
    NoVictimError,
    is_unpinned,
    session_terms,
)
from kvtier.policies.simulated_tier import SimulatedTier

__all__ = ["ONE_GROUP", "HybridTier", "PromptHits", "is_hybrid", "parse_group_list"]

ONE_GROUP: Final = "prefix"
"""The groups of a model with full attention only, as :func:`parse_group_list` reads them."""

_depth_of = operator.attrgetter("depth")
_WITH_TOKENS: Final = (Reach.WINDOW, Reach.LOCAL)


class PromptHits(NamedTuple):
    """The figures of one request. Numbers of chunks are sums over all groups.

    Attributes:
        depth: Number of the trace's chunks in the hit.
        loaded: Number of chunks that the hit needs.
        hits: Number of resident chunks among the references.
        refs: Number of references: chunks that were loaded or offered for storing.
        stranded: Number of chunks behind the hit's end that were resident on arrival.
    """

    depth: int
    loaded: int
    hits: int
    refs: int
    stranded: int


class HybridTier(SimulatedTier):
    """A simulated tier whose chunks belong to several KV cache groups.

    All groups have chunks of the same length. ``touch_order`` is ``forward`` or ``reverse``; by
    default the policy's own order.
    """

    def __init__(
        self,
        eviction: Eviction,
        groups: Sequence[GroupReach],
        *,
        touch_order: str | None = None,
    ) -> None:
        super().__init__(eviction, touch_order=touch_order)
        self._rules = HitRules(groups)

    def lead(self, keys: Sequence[ChunkKey]) -> int:
        """Return the number of leading ``keys`` that are resident."""
        members = self.members
        return next((at for at, key in enumerate(keys) if key not in members), len(keys))

    def has(self, key: ChunkKey) -> bool:
        """Return whether ``key`` is resident."""
        return key in self.members

    def serve_groups(
        self,
        keys: Sequence[Sequence[ChunkKey]],
        whole_chunks: int,
        now: float = 0.0,
        *,
        request: str = "",
        session: str = "",
    ) -> PromptHits:
        """Load and store the chunks of one request.

        Args:
            keys: The chunks of each group, root to leaf, without repetitions.
            whole_chunks: Number of chunks of each group that the prompt fills.
            now: Seconds on a monotonic clock.
            request: The request's id.
            session: The request's session; an empty string if unknown.

        Raises:
            NoVictimError: The policy picked too few victims.
        """
        ctx, members, size = self.ctx, self.members, self._rules.alignment_tokens
        ctx.now, ctx.request, ctx.session = now, request, session
        prompt = Prompt(keys, 0, len(keys[0]) * size)
        end_tokens = self._rules.longest(prompt, self)
        end = end_tokens // size
        stranded = sum(map(self.has, chain.from_iterable(part[end:] for part in keys)))
        needed = (members[key] for key in self._rules.needed(prompt, end_tokens))
        loaded = sorted(needed, key=_depth_of)
        offered = sorted(self._offered(keys, end, whole_chunks))
        found = [members.get(keys[group][at]) for at, group in offered]
        again = [copy for copy in found if copy is not None]
        new = [place for place, copy in zip(offered, found, strict=True) if copy is None]
        used = loaded + again
        for copy in used:
            copy.hits += 1
            copy.pins = 1
        self._touch(loaded)
        self._touch(again)
        self._store(keys, new[: self.eviction.capacity - len(used)])  # nearest to the root
        for copy in used:
            copy.pins = 0
        return PromptHits(end, len(loaded), len(used), len(loaded) + len(offered), stranded)

    def _offered(
        self, keys: Sequence[Sequence[ChunkKey]], end: int, whole_chunks: int
    ) -> Iterator[tuple[int, int]]:
        """Yield (depth, group) of each chunk to store after a hit of ``end`` chunks."""
        size, groups = self._rules.alignment_tokens, self._rules.groups
        is_prefix = [group.reach is Reach.PREFIX for group in groups]
        leads = [self.lead(part) for part, whole in zip(keys, is_prefix, strict=True) if whole]
        shared = min(leads, default=0)
        boundaries = sorted({min(shared, whole_chunks), whole_chunks})
        for number, group in enumerate(groups):
            start = end
            for boundary in [len(keys[number])] if is_prefix[number] else boundaries:
                first = group.first_token(boundary * size) // size
                for depth in range(max(first, start), boundary):
                    yield depth, number
                start = max(start, boundary)

    def _touch(self, copies: list[ChunkCopy]) -> None:
        """Record a use of ``copies``, given from root to leaf."""
        if copies:
            self.eviction.on_hit_many(copies[::-1] if self._is_reverse else copies, self.ctx)

    def _store(
        self, keys: Sequence[Sequence[ChunkKey]], places: Sequence[tuple[int, int]]
    ) -> None:
        """Insert the chunks at ``places``, (depth, group) pairs by depth; evict if full."""
        eviction, ctx, members = self.eviction, self.ctx, self.members
        if eviction.tracks_misses:
            for depth, group in places:
                eviction.on_miss(keys[group][depth], ctx)
        count = len(places) - (eviction.capacity - len(members))
        victims = eviction.pick_many(count, is_unpinned, ctx) if count > 0 else []
        if len(victims) < count:
            raise NoVictimError(eviction)
        for victim in victims:
            del members[victim.key]
        terms = session_terms(ctx.session)
        copies: list[ChunkCopy] = []
        for depth, group in places:
            key = keys[group][depth]
            copy = victims.pop() if victims else ChunkCopy(key, 0)
            copy.state = CopyState.RESIDENT
            copy.key, copy.hits, copy.depth, copy.terms = key, 0, depth, terms
            copy.parent = keys[group][depth - 1] if depth else None
            members[key] = copy
            copies.append(copy)
        if copies:
            eviction.on_insert_many(copies[::-1] if self._is_reverse else copies, ctx)


def is_hybrid(groups: Sequence[GroupReach]) -> bool:
    """Return False for a single group of full attention, else True."""
    return len(groups) > 1 or groups[0].reach is not Reach.PREFIX


def parse_group_list(text: str, *, chunk_tokens: int) -> tuple[GroupReach, ...]:
    """Parse KV cache groups such as ``prefix,window:1024,state``.

    Each group is a :class:`~kvtier.manager.hits.Reach`, ``window`` and ``local`` with a number
    of tokens; any other text is a ConfigError. Chunks have ``chunk_tokens`` tokens.

    >>> [group.window_tokens for group in parse_group_list("prefix,window:64", chunk_tokens=16)]
    [0, 64]
    """
    return tuple(_parse_group(part.strip(), text, chunk_tokens) for part in text.split(","))


def _parse_group(part: str, text: str, chunk_tokens: int) -> GroupReach:
    kind, colon, tokens = part.partition(":")
    reach = next((each for each in Reach if each.value == kind), None)
    if reach is None:
        problem = f"{part!r} is no kind of group"
    elif reach not in _WITH_TOKENS:
        if not colon:
            return GroupReach(chunk_tokens, reach)
        problem = f"{kind} has no number of tokens"
    elif tokens.isascii() and tokens.isdecimal() and int(tokens):
        return GroupReach(chunk_tokens, reach, int(tokens))
    else:
        problem = f"{kind} needs its number of tokens, such as {kind}:1024"
    remedy = "write prefix, window:TOKENS, local:TOKENS or state for each group, as in"
    raise ConfigError(f"--groups {text}: {problem}; {remedy} prefix,window:1024")
