"""Answers how much of a waiting request can be loaded, and reserves what a load will take.

The engine asks once per step for each request that waits. At first all tiers count:

* Every chunk is whole in RAM: the request can load at once.
* Some are in a slower tier and loads are direct: RAM slots are reserved for them until the step
  ends, and the request can load at once. ``prepare_load`` turns the reservation into slots.
* Otherwise the request joins the queue of the :class:`~kvtier.manager.promoter.Promoter` and is
  deferred until what it was granted has arrived. From then on only RAM counts.

A reservation is a number, not a slot: nothing is evicted for a request that may not be
scheduled. Reservations, direct loads in flight and the slots of stuck reads share
``pin_budget``, so a tier that does not answer leaves RAM to others. What other requests of the
step are to read from RAM counts as taken. Which copies a direct load evicts is up to the policy
nevertheless, so an engine should plan each load right after its lookup. If a chunk has no slot
then, the plan says so, and that load fails alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from kvtier.keys import ChunkKey
from kvtier.manager.found import Found, survey
from kvtier.manager.grants import Grants
from kvtier.manager.hits import HitRules, Presence, Prompt
from kvtier.manager.ladder import Ladder, first_whole
from kvtier.manager.promoter import Promoter
from kvtier.manager.requests import DEFERRED, Phase, RequestState
from kvtier.manager.tier import TierState
from kvtier.policies import ChunkCopy, CopyState
from kvtier.policies.base import is_idle

__all__ = ["HitLookup"]

_RESIDENT = CopyState.RESIDENT
_WRITING = CopyState.WRITING


class HitLookup:
    """Looks waiting requests up.

    Args:
        ladder: The tiers.
        rules: What a hit needs.
        grants: What is kept for requests.
        promoter: Queues requests whose chunks must be promoted first.
    """

    def __init__(
        self, ladder: Ladder, rules: HitRules, grants: Grants, promoter: Promoter
    ) -> None:
        self._ladder = ladder
        self._ram = ladder.ram
        self._rules = rules
        self._grants = grants
        self._promoter = promoter
        self._in_ram = _InRam(ladder.ram)
        self._reserved: dict[RequestState, _Reservation] = {}

    def lookup(self, request: RequestState, prompt: Prompt) -> int | None:
        """Return how many tokens can be loaded now, or None to be asked at the next step."""
        self._reserved.pop(request, None)
        if request.phase in DEFERRED:
            return None
        if request.phase == Phase.FAILED:
            return 0
        presence, readable = self._find_for(request)
        end = self._rules.longest(prompt, presence)
        if end + self._rules.alignment_tokens <= prompt.limit_tokens:
            self._note_missing(request, prompt, end)
        if end == prompt.local_tokens:
            return 0
        needed = self._rules.needed(prompt, end)
        copies = self._ram.lead_of(needed)
        if len(copies) == len(needed):
            self._ram.keep(copies, self._ladder.ctx)
            self._reserved[request] = _Reservation(0, copies)
        elif not self._can_load(request, survey(needed, self._ram, readable)):
            return None
        return end - prompt.local_tokens

    def residence(self, request: RequestState, key: ChunkKey) -> int | None:
        """Return the index of the fastest tier that can serve ``key``; None for a miss.

        A chunk on its way to RAM counts as one of a slower tier until it is whole, unless
        ``request`` is settled.
        """
        if request.phase == Phase.FAILED:
            return None
        presence, readable = self._find_for(request)
        if request.phase == Phase.ASKING:
            self._ladder.asked((key,))
        if not presence.has(key):
            self._count_miss(request)
            return None
        copy = self._ram.copies.get(key)
        if copy is None:
            found = first_whole(readable, key)
            return None if found is None else found[0].index
        self._ram.keep((copy,), self._ladder.ctx)
        return 0 if copy.state == _RESIDENT else 1

    def redeem(self, request: RequestState | None) -> None:
        """Release what was reserved for ``request``: its load has its slots, or none."""
        if request is not None:
            self._reserved.pop(request, None)

    def end_step(self) -> None:
        """Release what was reserved in this step and not used."""
        if self._reserved:
            self._reserved.clear()

    def _find_for(self, request: RequestState) -> tuple[Presence, Sequence[TierState]]:
        """Return what there is for ``request``, and the slower tiers that it may load from."""
        within = request.terms.load_tiers
        readable: Sequence[TierState] = ()
        presence: Presence = self._in_ram
        if request.phase == Phase.SETTLED:
            request.asked_at = self._ladder.step
        else:
            readable = self._ladder.readable(within)
            presence = _Anywhere(self._ram, readable)
        if within is not None:
            presence = _Within(presence, self._ladder, within)
        return presence, readable

    def _can_load(self, request: RequestState, found: Found) -> bool:
        """Return whether a load of ``found`` can be planned now; queue the request if not.

        Some of ``found`` are in slower tiers or on their way to RAM.
        """
        self._ladder.asked([copy.key for copy in compress(*found)])
        here = found.in_ram().copies
        self._ram.keep(here, self._ladder.ctx)
        whole = all(copy.state == _RESIDENT for copy in here)
        if whole and self._reserve(request, found, here):
            return True
        self._promoter.enqueue(request, [copy.key for copy in found.copies])
        return False

    def _reserve(self, request: RequestState, found: Found, here: Sequence[ChunkCopy]) -> bool:
        """Reserve RAM slots for a direct load of ``found``, if it is worth its time.

        Args:
            request: Who loads.
            found: All that it loads.
            here: The part that is whole in RAM.
        """
        ladder, grants = self._ladder, self._grants
        if not ladder.limits.direct_loads:
            return False
        reserved = self._reserved.values()
        wanted = _Reservation(len(found.tiers) - len(here), here)
        held = grants.granted + grants.streaming + ladder.ledger.stuck
        held += sum(other.fills for other in reserved)
        if wanted.fills > ladder.limits.pin_budget - held:
            return False
        if wanted.room > self._ram.room - sum(other.room for other in reserved):
            return False
        now = ladder.ctx.now
        if ladder.cost_model.choose(found.tiers, counted=found.counted, now=now) is not None:
            return False
        self._reserved[request] = wanted
        return True

    def _note_missing(self, request: RequestState, prompt: Prompt, end: int) -> None:
        """Note what ``request`` misses first: the chunks behind a hit of ``end`` tokens."""
        for group, keys in zip(self._rules.groups, prompt.keys, strict=True):
            first = end // group.chunk_tokens
            self._ladder.asked(keys[first : first + 1])
        self._count_miss(request)

    def _count_miss(self, request: RequestState) -> None:
        """Count a request once that is not there as a whole, if it may load from any tier."""
        if not request.missed and request.terms.load_tiers is None:
            request.missed = True
            for tier in self._ladder.tiers:
                tier.counters.misses += 1


class _Reservation(NamedTuple):
    """RAM slots that one load will take.

    Attributes:
        fills: Slots that it fills from slower tiers.
        reads: Copies that it reads, whole in RAM.
    """

    fills: int
    reads: Sequence[ChunkCopy]

    @property
    def room(self) -> int:
        """Slots that are free or could be made free, and will not be."""
        return self.fills + sum(map(is_idle, self.reads))


class _InRam:
    """What is whole in RAM."""

    def __init__(self, ram: TierState) -> None:
        self._ram = ram

    def lead(self, keys: Sequence[ChunkKey]) -> int:
        return len(self._ram.lead_of(keys))

    def has(self, key: ChunkKey) -> bool:
        copy = self._ram.copies.get(key)
        return copy is not None and copy.state == _RESIDENT


class _Anywhere:
    """What is in RAM, on its way there, or whole in one of the ``readable`` tiers."""

    def __init__(self, ram: TierState, readable: Sequence[TierState]) -> None:
        self._ram = ram
        self._readable = readable

    def lead(self, keys: Sequence[ChunkKey]) -> int:
        lead = len(self._ram.lead_of(keys))
        rest = keys[lead:]
        if self._readable and self._ram.copies.keys().isdisjoint(rest):
            lead += len(self._readable[0].lead_of(rest))
        while lead < len(keys) and self.has(keys[lead]):
            lead += 1
        return lead

    def has(self, key: ChunkKey) -> bool:
        copy = self._ram.copies.get(key)
        if copy is not None:
            return copy.state in (_RESIDENT, _WRITING)
        return first_whole(self._readable, key) is not None


class _Within:
    """What the tiers that a request may load from have, or sent to RAM."""

    def __init__(self, presence: Presence, ladder: Ladder, within: frozenset[int]) -> None:
        self._presence = presence
        self._ladder = ladder
        self._tiers = within

    def lead(self, keys: Sequence[ChunkKey]) -> int:
        lead = 0
        while lead < len(keys) and self.has(keys[lead]):
            lead += 1
        return lead

    def has(self, key: ChunkKey) -> bool:
        return self._presence.has(key) and self._ladder.held_within(key, self._tiers)
