"""Answers how much of a waiting request can be loaded, and reserves what a load will take.

The engine asks once per step for each request that waits. The first answer comes from all tiers:

* Every chunk is whole in RAM: the request can load at once.
* Some are in a slower tier and loads are direct: RAM slots are reserved for them until the step
  ends, and the request can load at once. ``prepare_load`` turns the reservation into slots.
* Otherwise the request joins the queue of the :class:`~kvtier.manager.promoter.Promoter` and is
  deferred until what it was granted has arrived. From then on only RAM counts.

A reservation is a number, not a slot: nothing is evicted for a request that may not be
scheduled. Reservations, direct loads in flight and the slots of stuck reads share
``pin_budget``, so a tier that does not answer leaves RAM to others. An engine that looks up many
requests before it loads the first can still exceed what RAM can evict. Then a chunk has no slot,
the plan says so, and that load fails alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.keys import ChunkKey
from kvtier.manager.found import Found, survey
from kvtier.manager.grants import Grants
from kvtier.manager.hits import HitRules, Prompt
from kvtier.manager.ladder import Ladder, first_whole
from kvtier.manager.promoter import Promoter
from kvtier.manager.requests import DEFERRED, Phase, RequestState
from kvtier.manager.tier import TierState
from kvtier.policies import CopyState

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
        self._reserved: dict[RequestState, tuple[int, int]] = {}
        """RAM slots that each request's load will fill, and those it will read."""

    def lookup(self, request: RequestState, prompt: Prompt) -> int | None:
        """Return how many tokens can be loaded now, or None to be asked at the next step."""
        phase = request.phase
        if phase in DEFERRED:
            return None
        if phase == Phase.FAILED:
            return 0
        within = request.terms.load_tiers
        if phase == Phase.SETTLED:
            request.asked_at = self._ladder.step
            presence = self._in_ram if within is None else _Within(self._ladder, within, ())
            return self._settled(request, prompt, self._rules.longest(prompt, presence))
        readable = self._ladder.readable(within)
        if within is None:
            end = self._rules.longest(prompt, _Anywhere(self._ram, readable))
        else:
            end = self._rules.longest(prompt, _Within(self._ladder, within, readable))
        self._count_miss(request, prompt, end)
        if end == prompt.local_tokens:
            return 0
        needed = self._rules.needed(prompt, end)
        copies = self._ram.lead_of(needed)
        if len(copies) == len(needed):
            self._ram.keep(copies, self._ladder.ctx)
            self._reserved[request] = (0, len(copies))
        elif not self._can_load(request, survey(needed, self._ram, readable)):
            return None
        return end - prompt.local_tokens

    def residence(self, request: RequestState, key: ChunkKey) -> int | None:
        """Return the index of the fastest tier that can serve ``key``; None for a miss.

        A chunk on its way to RAM counts as one of a slower tier until it is whole, unless
        ``request`` is settled.
        """
        within = request.terms.load_tiers
        if request.phase == Phase.FAILED:
            return None
        if within is not None and not self._ladder.held_within(key, within):
            return None
        copy = self._ram.copies.get(key)
        if copy is not None and copy.state == _RESIDENT:
            self._ram.keep((copy,), self._ladder.ctx)
            return 0
        if request.phase == Phase.SETTLED:
            request.asked_at = self._ladder.step
            return None
        self._ladder.asked(key)
        if copy is not None:
            return 1 if copy.state == _WRITING else None
        found = first_whole(self._ladder.readable(within), key)
        return None if found is None else found[0].index

    def redeem(self, request: RequestState | None) -> None:
        """Release what was reserved for ``request``: its load has its slots, or none."""
        if request is not None:
            self._reserved.pop(request, None)

    def end_step(self) -> None:
        """Release what was reserved in this step and not used."""
        if self._reserved:
            self._reserved.clear()

    def _settled(self, request: RequestState, prompt: Prompt, end: int) -> int:
        """Answer a request from RAM alone."""
        needed = self._rules.needed(prompt, end)
        if self._ram.leaving:
            self._ram.keep(self._ram.whole(needed), self._ladder.ctx)
        self._count_miss(request, prompt, end)
        return end - prompt.local_tokens

    def _can_load(self, request: RequestState, found: Found) -> bool:
        """Return whether a load of ``found`` can be planned now; queue the request if not.

        Some of ``found`` are in slower tiers or on their way to RAM.
        """
        here = found.in_ram().copies
        self._ram.keep(here, self._ladder.ctx)
        whole = all(copy.state == _RESIDENT for copy in here)
        if whole and self._reserve(request, found):
            return True
        if self._ladder.follows_reuse:
            for copy, tier in zip(*found, strict=True):
                if tier:
                    self._ladder.asked(copy.key)
        self._promoter.enqueue(request, [copy.key for copy in found.copies])
        return False

    def _reserve(self, request: RequestState, found: Found) -> bool:
        """Reserve RAM slots for a direct load of ``found``, if it is worth its time."""
        ladder, grants = self._ladder, self._grants
        if not ladder.limits.streams:
            return False
        below = len(found.tiers) - found.tiers.count(0)
        others = [held for other, held in self._reserved.items() if other is not request]
        held = grants.granted + grants.streaming + ladder.ledger.stuck
        held += sum(fills for fills, _ in others)
        if below > ladder.limits.pin_budget - held:
            return False
        taken = sum(fills + reads for fills, reads in others)
        if len(found.tiers) > self._ram.room - taken:
            return False
        now = ladder.ctx.now
        if ladder.worth.choose(found.tiers, counted=found.counted, now=now) is not None:
            return False
        self._reserved[request] = (below, len(found.tiers) - below)
        return True

    def _count_miss(self, request: RequestState, prompt: Prompt, end: int) -> None:
        """Count a request whose whole prompt is not there, once, and note what it misses."""
        size = self._rules.groups[0].chunk_tokens
        if end + self._rules.alignment_tokens > prompt.limit_tokens:
            return
        missing = prompt.keys[0][end // size : end // size + 1]
        for key in missing:
            self._ladder.asked(key)
        if not request.missed:
            request.missed = True
            for tier in self._ladder.tiers:
                tier.counters.misses += 1


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

    def __init__(
        self, ladder: Ladder, within: frozenset[int], readable: Sequence[TierState]
    ) -> None:
        self._ladder = ladder
        self._within = within
        self._anywhere = _Anywhere(ladder.ram, readable) if readable else _InRam(ladder.ram)

    def lead(self, keys: Sequence[ChunkKey]) -> int:
        lead = 0
        while lead < len(keys) and self.has(keys[lead]):
            lead += 1
        return lead

    def has(self, key: ChunkKey) -> bool:
        return self._anywhere.has(key) and self._ladder.held_within(key, self._within)
