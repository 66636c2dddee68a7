"""Finds how much of a waiting request can be loaded.

The engine looks up a waiting request once per step. The first lookup searches all tiers. If
:mod:`kvtier.manager.direct` can reserve the slots of a load, the request loads its hit at once.
Otherwise it is deferred until the chunks are promoted; its later lookups search only RAM.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.keys import ChunkKey
from kvtier.manager.direct import DirectLoads
from kvtier.manager.grants import (
    DEFERRED,
    Grants,
    LookupPhase,
    RequestState,
    SharedAccess,
)
from kvtier.manager.hits import HitRules, Prompt
from kvtier.manager.questions import Questions
from kvtier.manager.tier import TierState
from kvtier.manager.tier_stack import TierStack, first_resident
from kvtier.policies import CopyState

__all__ = ["HitLookup"]

_RESIDENT = CopyState.RESIDENT
_LATE = CopyState.LATE


class HitLookup:
    """Looks up the chunks of waiting requests.

    Args:
        stack: The tiers.
        rules: The chunks that a hit needs.
        grants: Records the lookups.
        direct: Reserves the slots of loads.
        questions: Asks the shared tier, if there is one.
    """

    def __init__(
        self,
        stack: TierStack,
        rules: HitRules,
        grants: Grants,
        direct: DirectLoads,
        questions: Questions,
    ) -> None:
        self._stack = stack
        self._ram = stack.ram
        self._rules = rules
        self._grants = grants
        self._direct = direct
        self._questions = questions

    def lookup(self, request: RequestState, prompt: Prompt) -> int | None:
        """Return how many tokens can be loaded now; None to look up again in the next step."""
        if request.shared == SharedAccess.NOWHERE:
            request.shared = SharedAccess.NONE  # a later lookup searches again
            self._record_missing(request, prompt, prompt.local_tokens)
            return 0
        self._grants.record_lookup(request)
        if request.phase in DEFERRED or request.shared == SharedAccess.ASKED:
            return None
        if request.phase == LookupPhase.FAILED:
            return 0
        return self._search(request, prompt)

    def residence(self, request: RequestState, key: ChunkKey) -> int | None:
        """Return the index of the fastest tier that can serve ``key``; None for a miss.

        While ``request`` may still wait for promotions, a chunk on its way to RAM counts as a
        chunk of a slower tier.
        """
        if request.phase == LookupPhase.FAILED:
            return None
        self._grants.record_lookup(request)
        presence = self._presence_for(request)
        if request.phase == LookupPhase.OPEN:
            self._stack.record_wanted((key,))
        if not presence.has(key):
            self._count_miss(request)
            return None
        copy = self._ram.copies.get(key)
        if copy is None:
            found = first_resident(presence.readable or (), key)
            return None if found is None else found[0].index
        self._ram.restore((copy,), self._stack.ctx)
        return 0 if copy.state == _RESIDENT else 1

    def _search(self, request: RequestState, prompt: Prompt) -> int | None:
        """Search the tiers, or ask the shared tier first; see :meth:`lookup`."""
        presence = self._presence_for(request)
        if (
            self._stack.shared is not None
            and request.shared == SharedAccess.UNKNOWN
            and request.phase == LookupPhase.OPEN
            and self._questions.ask(request, prompt, presence.lead)
        ):
            return None
        end = self._rules.longest(prompt, presence)
        self._record_missing(request, prompt, end)
        if end == prompt.local_tokens:
            return 0
        needed = self._rules.needed(prompt, end)
        if self._direct.reserve(request, needed):
            return end - prompt.local_tokens
        self._grants.enqueue(request, needed)
        return None

    def _presence_for(self, request: RequestState) -> _Presence:
        """Return which chunks ``request`` may load."""
        allowed = request.terms.load_tiers
        if request.phase == LookupPhase.SETTLED:
            return _Presence(self._stack, None, allowed)
        readable = self._stack.readable(allowed, with_shared=request.reads_shared)
        return _Presence(self._stack, readable, allowed)

    def _record_missing(self, request: RequestState, prompt: Prompt, end: int) -> None:
        """Record a lookup of each group's first chunk after the hit, and count a miss.

        ``end`` is the end of the hit in tokens. If no longer hit is possible, this method does
        nothing.
        """
        if end + self._rules.alignment_tokens > prompt.limit_tokens:
            return
        for group, keys in zip(self._rules.groups, prompt.keys, strict=True):
            first = end // group.chunk_tokens
            self._stack.record_wanted(keys[first : first + 1])
        self._count_miss(request)

    def _count_miss(self, request: RequestState) -> None:
        """Count the first miss of a request that may load from all tiers."""
        if not request.is_miss_counted and request.terms.load_tiers is None:
            request.is_miss_counted = True
            for tier in self._stack.tiers:
                tier.counters.misses += 1


class _Presence:
    """Reports which chunks one request may load.

    Args:
        stack: The tiers.
        readable: Slower tiers from which the request may load. None if the request may load
            only chunks that are resident in RAM.
        allowed: Tiers from which the request's chunks may come; None for all.
    """

    def __init__(
        self,
        stack: TierStack,
        readable: Sequence[TierState] | None,
        allowed: frozenset[int] | None,
    ) -> None:
        self._stack = stack
        self._ram = stack.ram
        self.readable = readable
        self._allowed = allowed

    def lead(self, keys: Sequence[ChunkKey]) -> int:
        if self._allowed is not None:
            return next((at for at, key in enumerate(keys) if not self.has(key)), len(keys))
        if self.readable is None:
            return len(self._ram.leading(keys))
        return len(self._stack.find_leading(keys, self.readable)[0])

    def has(self, key: ChunkKey) -> bool:
        if self._allowed is not None and not self._stack.is_from(key, self._allowed):
            return False
        copy = self._ram.copies.get(key)
        if self.readable is None:
            return copy is not None and copy.state == _RESIDENT
        if copy is not None:
            return copy.state != _LATE
        return first_resident(self.readable, key) is not None
