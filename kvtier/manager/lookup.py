"""Decides how much of a waiting request can be loaded, and reserves the slots of its load.

The engine looks up a waiting request once per step. At first all tiers count:

* All chunks are resident in RAM: the request can load now.
* Some are in a slower tier, and loads are direct: RAM slots are reserved until the step ends,
  and the request can load now. ``prepare_load`` turns the reservation into slots.
* Otherwise the request is queued for promotion and deferred until its chunks have arrived.
  From then on only RAM counts.

A reservation is a number of slots: nothing is evicted for a request that may not be scheduled.
Reservations, direct loads in flight and late promotions share ``pin_budget``, so a tier that
hangs leaves RAM to others. RAM copies that other requests of the step will read count as taken.
The policy still chooses the victims, so an engine should plan each load right after its lookup.
If a chunk has no slot when its load is planned, only that load fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from kvtier.keys import GROUP_NBYTES, ChunkKey, is_single_group
from kvtier.manager.grants import DEFERRED, Grants, Phase, RequestState
from kvtier.manager.hits import HitRules, Presence, Prompt
from kvtier.manager.tier import TierState
from kvtier.manager.tier_stack import TierStack, first_resident
from kvtier.policies import ChunkCopy, CopyState
from kvtier.policies.base import is_idle

__all__ = ["HitLookup", "LookupResult", "find_leading"]

_RESIDENT = CopyState.RESIDENT
_LATE = CopyState.LATE


class LookupResult(NamedTuple):
    """Chunks that a lookup found, in the order of the request's load.

    Attributes:
        copies: A copy of each chunk: in RAM, or else in a slower tier.
        tiers: Index of the tier of each copy.
    """

    copies: Sequence[ChunkCopy]
    tiers: Sequence[int]

    @property
    def groups(self) -> int:
        """Number of KV cache groups."""
        return len(self._chunks_per_group())

    @property
    def counted(self) -> int:
        """Number of chunks in the group with most chunks, used to count tokens.

        That group reads the whole prefix; a sliding window needs only the last chunks.
        """
        return max(self._chunks_per_group().values())

    def _chunks_per_group(self) -> Counter[bytes]:
        copies = self.copies
        if copies and is_single_group((copies[0].key, copies[-1].key)):
            return Counter({copies[0].key[-GROUP_NBYTES:]: len(copies)})
        return Counter(copy.key[-GROUP_NBYTES:] for copy in copies)

    @property
    def cost(self) -> int:
        """Additional RAM slots of the pin budget that granting the chunks takes."""
        return sum([bool(tier or not copy.grants) for copy, tier in zip(*self, strict=True)])

    def head(self, chunks: int) -> LookupResult:
        """Return the first ``chunks`` chunks."""
        return LookupResult(self.copies[:chunks], self.tiers[:chunks])

    def in_ram(self) -> LookupResult:
        """Return the chunks that are in RAM."""
        copies = [copy for copy, tier in zip(*self, strict=True) if not tier]
        return LookupResult(copies, [0] * len(copies))

    def affordable(self, budget: int) -> LookupResult:
        """Return the longest useful head with a cost of at most ``budget``.

        With several groups a head is useless, except for the chunks in RAM.
        """
        found = self if self.groups == 1 else self.in_ram()
        for end, (copy, tier) in enumerate(zip(*found, strict=True)):
            if tier or not copy.grants:
                budget -= 1
                if budget < 0:
                    return found.head(end)
        return found

    def unreachable(self, promoted: int) -> list[ChunkCopy]:
        """Return the RAM copies behind the first chunk that is not promoted.

        Args:
            promoted: How many chunks of slower tiers are promoted.
        """
        if promoted == len(self.tiers) - self.tiers.count(0):
            return []
        behind: list[ChunkCopy] = []
        for copy, tier in zip(*self, strict=True):
            if tier:
                promoted -= 1
            elif promoted < 0:
                behind.append(copy)
        return behind


def find_leading(
    keys: Sequence[ChunkKey], ram: TierState, readable: Sequence[TierState]
) -> LookupResult:
    """Find ``keys`` in RAM or else in ``readable``, up to the first missing key."""
    copies = ram.leading(keys)
    tiers = [0] * len(copies)
    rest = keys[len(copies) :]
    if readable and ram.copies.keys().isdisjoint(rest):
        copies += readable[0].leading(rest)
        tiers += [readable[0].index] * (len(copies) - len(tiers))
    for key in keys[len(copies) :]:
        copy = ram.copies.get(key)
        if copy is None:
            found = first_resident(readable, key)
            if found is None:
                break
            tier, copy = found
            tiers.append(tier.index)
        elif copy.state == _LATE:
            break
        else:
            tiers.append(0)
        copies.append(copy)
    return LookupResult(copies, tiers)


class _Reservation(NamedTuple):
    """RAM slots that one load will take.

    Attributes:
        fills: Slots that the load fills from slower tiers.
        reads: Resident RAM copies that the load reads.
    """

    fills: int
    reads: Sequence[ChunkCopy]

    @property
    def slots(self) -> int:
        """Available slots that the load will use up."""
        return self.fills + sum(map(is_idle, self.reads))


class HitLookup:
    """Looks up the chunks of waiting requests.

    Args:
        stack: The tiers.
        rules: The chunks that a hit needs.
        grants: Queues requests whose chunks must be promoted first.
    """

    def __init__(self, stack: TierStack, rules: HitRules, grants: Grants) -> None:
        self._stack = stack
        self._ram = stack.ram
        self._rules = rules
        self._grants = grants
        self._reserved: dict[RequestState, _Reservation] = {}

    def lookup(self, request: RequestState, prompt: Prompt) -> int | None:
        """Return how many tokens can be loaded now; None to look up again in the next step."""
        self._reserved.pop(request, None)
        if request.phase in DEFERRED:
            return None
        if request.phase == Phase.FAILED:
            return 0
        presence, readable = self._presence_for(request)
        end = self._rules.longest(prompt, presence)
        if end + self._rules.alignment_tokens <= prompt.limit_tokens:
            self._record_missing(request, prompt, end)
        if end == prompt.local_tokens:
            return 0
        needed = self._rules.needed(prompt, end)
        copies = self._ram.leading(needed)
        if len(copies) == len(needed):
            self._ram.restore(copies, self._stack.ctx)
            self._reserved[request] = _Reservation(0, copies)
        elif not self._can_load(request, find_leading(needed, self._ram, readable)):
            return None
        return end - prompt.local_tokens

    def residence(self, request: RequestState, key: ChunkKey) -> int | None:
        """Return the index of the fastest tier that can serve ``key``; None for a miss.

        Unless ``request`` is settled, a chunk on its way to RAM counts as a chunk of a slower
        tier until it is whole.
        """
        if request.phase == Phase.FAILED:
            return None
        presence, readable = self._presence_for(request)
        if request.phase == Phase.OPEN:
            self._stack.record_wanted((key,))
        if not presence.has(key):
            self._count_miss(request)
            return None
        copy = self._ram.copies.get(key)
        if copy is None:
            found = first_resident(readable, key)
            return None if found is None else found[0].index
        self._ram.restore((copy,), self._stack.ctx)
        return 0 if copy.state == _RESIDENT else 1

    def redeem(self, request: RequestState | None) -> None:
        """End the reservation of ``request`` because its load is planned."""
        if request is not None:
            self._reserved.pop(request, None)

    def end_step(self) -> None:
        """End the reservations that were not used in this step."""
        if self._reserved:
            self._reserved.clear()

    def _presence_for(self, request: RequestState) -> tuple[Presence, Sequence[TierState]]:
        """Return the chunks that ``request`` may load, and its readable slower tiers."""
        allowed = request.terms.load_tiers
        if request.phase == Phase.SETTLED:
            request.looked_up_at = self._stack.step
            return _Presence(self._stack, None, allowed), ()
        readable = self._stack.readable(allowed)
        return _Presence(self._stack, readable, allowed), readable

    def _can_load(self, request: RequestState, found: LookupResult) -> bool:
        """Return whether a load of ``found`` can be planned now; queue the request if not.

        Some of ``found`` are in slower tiers or on their way to RAM.
        """
        self._stack.record_wanted([copy.key for copy in compress(*found)])
        in_ram = found.in_ram().copies
        self._ram.restore(in_ram, self._stack.ctx)
        are_whole = all(copy.state == _RESIDENT for copy in in_ram)
        if are_whole and self._reserve(request, found, in_ram):
            return True
        self._grants.enqueue(request, [copy.key for copy in found.copies])
        return False

    def _reserve(
        self, request: RequestState, found: LookupResult, in_ram: Sequence[ChunkCopy]
    ) -> bool:
        """Reserve RAM slots for a direct load of ``found``, if the load is worth its time.

        Args:
            request: The request.
            found: All chunks of the load.
            in_ram: The chunks of ``found`` that are resident in RAM.
        """
        stack = self._stack
        if not stack.limits.direct_loads:
            return False
        others = self._reserved.values()
        reservation = _Reservation(len(found.tiers) - len(in_ram), in_ram)
        used = self._grants.used_budget + sum(other.fills for other in others)
        if reservation.fills > stack.limits.pin_budget - used:
            return False
        if reservation.slots > self._ram.available - sum(other.slots for other in others):
            return False
        now = stack.ctx.now
        if stack.cost_model.choose(found.tiers, counted=found.counted, now=now) is not None:
            return False
        self._reserved[request] = reservation
        return True

    def _record_missing(self, request: RequestState, prompt: Prompt, end: int) -> None:
        """Record the first chunk of each group behind a hit of ``end`` tokens as wanted."""
        for group, keys in zip(self._rules.groups, prompt.keys, strict=True):
            first = end // group.chunk_tokens
            self._stack.record_wanted(keys[first : first + 1])
        self._count_miss(request)

    def _count_miss(self, request: RequestState) -> None:
        """Count the first miss of a request that may load from every tier."""
        if not request.is_miss_counted and request.terms.load_tiers is None:
            request.is_miss_counted = True
            for tier in self._stack.tiers:
                tier.counters.misses += 1


class _Presence:
    """The chunks that one request may load.

    Args:
        stack: The tiers.
        readable: Slower tiers that it may load from; chunks on their way to RAM count too. None
            if only resident chunks in RAM count.
        allowed: Tiers that its chunks may come from; None for all.
    """

    def __init__(
        self,
        stack: TierStack,
        readable: Sequence[TierState] | None,
        allowed: frozenset[int] | None,
    ) -> None:
        self._stack = stack
        self._ram = stack.ram
        self._readable = readable
        self._allowed = allowed

    def lead(self, keys: Sequence[ChunkKey]) -> int:
        lead = 0
        if self._allowed is None:
            lead = len(self._ram.leading(keys))
            if lead == len(keys) or self._readable is None:
                return lead
            rest = keys[lead:]
            if self._readable and self._ram.copies.keys().isdisjoint(rest):
                lead += len(self._readable[0].leading(rest))
        while lead < len(keys) and self.has(keys[lead]):
            lead += 1
        return lead

    def has(self, key: ChunkKey) -> bool:
        if self._allowed is not None and not self._stack.is_from(key, self._allowed):
            return False
        copy = self._ram.copies.get(key)
        if self._readable is None:
            return copy is not None and copy.state == _RESIDENT
        if copy is not None:
            return copy.state != _LATE
        return first_resident(self._readable, key) is not None
