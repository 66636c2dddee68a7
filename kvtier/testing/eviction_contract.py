"""The contract of eviction policies, as a test class to inherit.

::

    class TestLru(EvictionContract):
        def make_eviction(self, *, capacity: int) -> Lru:
            return Lru(capacity)
"""

# ruff: noqa: D102 - the name of a test says what it shows
from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from kvtier.keys import ChunkKey, make_key
from kvtier.policies import ChunkCopy, CopyState, Eviction, PolicyContext
from kvtier.testing.model_tier import PINNED, STREAMS, ModelTier, Stream
from kvtier.testing.probes import count_entries, count_steps, noting, packages_of, reachable

__all__ = ["EvictionContract"]

_ENTRIES_OF_EMPTY = 288
_GHOSTS_PER_SLOT = 2
_SMALL, _LARGE, _GROWTH = 40, 640, 1.5
"""Capacities of two tiers in slots, and the largest accepted ratio of their work per access."""


class EvictionContract(ABC):
    """Tests that every eviction policy must pass.

    Inherit as ``TestX`` and implement :meth:`make_eviction`.

    Attributes:
        entries_per_slot: Largest number of references that the policy may keep for each slot.
    """

    entries_per_slot = 8

    @abstractmethod
    def make_eviction(self, *, capacity: int) -> Eviction:
        """Return a new policy for a tier of ``capacity`` slots."""

    def test_what_was_inserted_is_picked_once_each(self) -> None:
        eviction, copies, ctx = self._filled(8)
        _check_members(eviction, copies, ctx)
        assert eviction.pick(_any, ctx) is None

    def test_a_hit_neither_adds_nor_removes_a_member(self) -> None:
        eviction, copies, ctx = self._filled(8)
        for copy in (*copies[:4], *copies[:4], copies[6]):
            eviction.on_hit(copy, ctx)
        _check_members(eviction, copies, ctx)

    def test_only_evictable_copies_are_picked(self) -> None:
        eviction, copies, ctx = self._filled(8)
        allowed = set(copies[::3])
        picked = _pick_all(eviction, ctx, allowed)
        assert set(picked) == allowed

    def test_a_rejected_copy_stays_a_member(self) -> None:
        eviction, copies, ctx = self._filled(4)
        assert eviction.pick(_none, ctx) is None
        assert set(_pick_all(eviction, ctx)) == set(copies)

    def test_it_returns_what_is_declared(self) -> None:
        eviction, copies, ctx = self._filled(8)
        policy: Any = eviction  # mypy assumes that these methods return None
        victims = policy.pick_many(2, _any, ctx)
        staying = [copy for copy in copies if copy not in victims]
        staying[0].state = CopyState.GONE
        returned = [
            policy.on_miss(b"absent", ctx),
            policy.on_stay(victims[0], ctx),
            policy.on_insert(victims[1], ctx),
            policy.on_hit(staying[1], ctx),
            policy.on_hit_many(iter(staying[2:4]), ctx),
            policy.on_remove(staying[0]),
            policy.on_insert_many([], ctx),
        ]
        assert type(victims) is list
        assert returned == [None] * len(returned)

    def test_an_empty_order_has_no_victim(self) -> None:
        assert self.make_eviction(capacity=4).pick(_any, PolicyContext()) is None

    def test_when_nothing_is_evictable_every_member_is_asked_for_at_most_once(self) -> None:
        eviction, copies, ctx = self._filled(16)
        asked: list[ChunkCopy] = []

        def refuse(copy: ChunkCopy) -> bool:
            asked.append(copy)
            return False

        assert eviction.pick(refuse, ctx) is None
        assert len(asked) <= len(copies)
        asked.clear()
        assert eviction.pick_many(len(copies), refuse, ctx) == []
        assert len(asked) <= 2 * len(copies)  # some ask before they pick one by one

    def test_a_removed_copy_is_never_picked(self) -> None:
        eviction, copies, ctx = self._filled(8)
        eviction.on_hit(copies[0], ctx)
        for copy in (copies[0], copies[3], copies[7]):
            copy.state = CopyState.GONE
            eviction.on_remove(copy)
        assert set(_pick_all(eviction, ctx)) == {*copies[1:3], *copies[4:7]}

    def test_a_picked_copy_can_come_back(self) -> None:
        eviction, copies, ctx = self._filled(4)
        for copy in copies[:2]:
            eviction.on_hit(copy, ctx)
        picked = _pick_all(eviction, ctx)
        for copy in picked:
            eviction.on_insert(copy, ctx)
        _check_members(eviction, copies, ctx)

    def test_a_picked_copy_can_stay(self) -> None:
        eviction, copies, ctx = self._filled(8)
        for _ in range(200):
            first, second = eviction.pick(_any, ctx), eviction.pick(_any, ctx)
            assert first is not None
            assert second is not None
            eviction.on_stay(second, ctx)
            eviction.on_stay(first, ctx)
            eviction.on_hit(first, ctx)
        _check_members(eviction, copies, ctx)
        assert count_entries(eviction) <= self.entries_per_slot * 8 + _ENTRIES_OF_EMPTY

    def test_the_same_key_in_a_new_copy_is_a_new_member(self) -> None:
        eviction, copies, ctx = self._filled(2)
        old = copies[0]
        eviction.on_hit(old, ctx)
        old.state = CopyState.GONE
        eviction.on_remove(old)
        new = _make_copies(1)[0]
        eviction.on_insert(new, ctx)
        assert set(_pick_all(eviction, ctx)) == {new, copies[1]}

    def test_batch_forms_equal_the_single_forms(self) -> None:
        single, singles, ctx = self._filled(8)
        batch, batches = self.make_eviction(capacity=8), _make_copies(8)
        batch_ctx = PolicyContext()  # a second one, for equal random numbers
        for copy in batches:
            batch.on_miss(copy.key, batch_ctx)
        batch.on_insert_many(batches, batch_ctx)
        for copy in singles[2:6]:
            single.on_hit(copy, ctx)
        batch.on_hit_many(iter(batches[2:6]), batch_ctx)
        order = [copy.key for copy in _pick_all(single, ctx)]
        assert [copy.key for copy in _pick_all(batch, batch_ctx)] == order

    def test_a_batch_of_victims_leaves_and_is_of_those_that_may_go(self) -> None:
        eviction, copies, ctx = self._filled(8)
        allowed = set(copies[::3])
        assert eviction.pick_many(0, _any, ctx) == []
        first = eviction.pick_many(2, allowed.__contains__, ctx)
        second = eviction.pick_many(8, allowed.__contains__, ctx)
        assert len(first) == 2
        assert len(second) == len(allowed) - 2
        assert {*first, *second} == allowed
        rest = eviction.pick_many(9, _any, ctx)
        assert len(rest) == len(copies) - len(allowed)
        assert {*rest} == {*copies} - allowed
        assert eviction.pick_many(1, _any, ctx) == []

    def test_batches_among_pins_do_what_calls_for_one_chunk_do(self) -> None:
        capacity, rng, keys = 24, random.Random(7), _keys(64)
        single, batch = (
            ModelTier(self.make_eviction(capacity=capacity), one_by_one=one_by_one)
            for one_by_one in (True, False)
        )
        for _ in range(400):
            single.pinned = batch.pinned = set(rng.sample(keys, rng.choice((0, 16, 48))))
            allowed, members = single.may_go(), list(single.members)
            # A batch that asks for too many victims may reorder the remaining copies.
            leaving = min(rng.randrange(8), len(allowed))
            victims = [victim.key for victim in batch.evict_many(leaving)]
            assert victims == [victim.key for victim in single.evict_many(leaving)]
            assert len(victims) == leaving
            assert allowed.issuperset(victims)
            used = rng.sample(members, min(rng.randrange(8), len(members)))
            used = [key for key in used if key in single.members]
            absent = [key for key in keys if key not in single.members]
            room = capacity - len(single.members)
            coming = rng.sample(absent, min(rng.randrange(8), room))
            for tier in (single, batch):
                tier.use_many(used)
                tier.insert_many(coming)

    def test_a_prompt_that_comes_as_a_batch_is_inserted_once_each(self) -> None:
        eviction, ctx = self.make_eviction(capacity=8), PolicyContext()
        copies = _make_prompt(8)
        eviction.on_insert_many(copies, ctx)
        _check_members(eviction, copies, ctx)

    def test_a_prompt_that_comes_as_a_batch_enters_from_either_end(self) -> None:
        for is_downwards in (True, False):
            orders: list[list[ChunkKey]] = []
            for in_bulk, is_turned in ((True, False), (False, False), (False, True)):
                eviction, ctx = self.make_eviction(capacity=8), PolicyContext()
                prompt = _make_prompt(8)
                if is_downwards == is_turned:
                    prompt.reverse()
                if in_bulk:
                    eviction.on_insert_many(prompt, ctx)
                else:
                    for copy in prompt:
                        eviction.on_insert(copy, ctx)
                orders.append([copy.key for copy in _pick_all(eviction, ctx)])
            with noting(is_downwards=is_downwards):
                assert orders[0] in orders[1:]

    def test_rejected_candidates_are_not_asked_again_at_every_pick(self) -> None:
        members = 512
        eviction, copies, ctx = self._filled(members)
        pinned = set(copies[: members // 2])
        calls = 0

        def evictable(copy: ChunkCopy) -> bool:
            nonlocal calls
            calls += 1
            return copy not in pinned

        for _ in range(members // 2):
            assert eviction.pick(evictable, ctx) is not None
        # Linear with a generous factor; asking for all pinned copies each time takes 131,072.
        assert calls <= 8 * members

    def test_memory_stays_in_proportion_to_the_tier_whatever_passes_through(self) -> None:
        capacity = 16
        eviction, copies, ctx = self._filled(capacity)
        for round_number in range(200):
            for copy in copies:
                eviction.on_hit(copy, ctx)
            eviction.on_hit_many(list(copies), ctx)
            if round_number % 4 == 0:
                leaving = copies.pop(0)
                leaving.state = CopyState.GONE
                eviction.on_remove(leaving)
                copies += _make_copies(1, start=capacity + round_number)
                eviction.on_miss(copies[-1].key, ctx)
                eviction.on_insert(copies[-1], ctx)
        assert count_entries(eviction) <= self.entries_per_slot * capacity + _ENTRIES_OF_EMPTY

    def test_memory_stays_in_proportion_when_copies_come_and_go_unused(self) -> None:
        capacity = 16
        eviction, ctx = self.make_eviction(capacity=capacity), PolicyContext()
        for number in range(5000):
            copy = _make_copies(1, start=number)[0]
            eviction.on_insert(copy, ctx)
            copy.state = CopyState.GONE
            eviction.on_remove(copy)
        assert count_entries(eviction) <= self.entries_per_slot * capacity + _ENTRIES_OF_EMPTY
        assert eviction.pick(_any, ctx) is None

    def test_the_right_victims_are_found_among_pins_that_come_and_go(self) -> None:
        rng = random.Random(4)
        tier = ModelTier(self.make_eviction(capacity=24))
        keys = _keys(64)
        for _ in range(3000):
            key = rng.choice(keys)
            tier.pinned = set(rng.sample(keys, rng.choice((0, 16, 48, 60))))
            allowed, asked = tier.may_go(), tier.asked
            what = rng.random()
            if what < 0.8:
                tier.access(key)
            elif what < 0.85 and key in tier.members:
                tier.remove(key)
            else:
                members = len(tier.members)
                victim = tier.evict()
                assert victim.key in allowed if victim is not None else not allowed
                assert tier.asked - asked <= members, "somebody was asked twice in one pick"
        assert len(tier.members) <= tier.eviction.capacity

    def test_ghosts_are_keys_and_bounded(self) -> None:
        capacity, rng = 32, random.Random(5)
        tier = ModelTier(self.make_eviction(capacity=capacity))
        for number in range(100 * capacity):
            near = rng.randrange(max(number - 3 * capacity, 0), number + 1)
            tier.access(_key(number if number % 3 else near))
            if number % capacity == 0:
                held = list(reachable(tier.eviction))
                copies = {item for item in held if isinstance(item, ChunkCopy)}
                assert copies <= set(tier.members.values()), "it refers to a copy that left"
                ghosts = {item for item in held if isinstance(item, bytes)} - set(tier.members)
                assert len(ghosts) <= _GHOSTS_PER_SLOT * capacity

    def test_the_work_per_operation_does_not_grow_with_the_tier(self) -> None:
        for name, stream in STREAMS.items():
            work = {}
            for capacity in (_SMALL, _LARGE):
                with noting(capacity=capacity, stream=name):
                    pinned = name in PINNED
                    work[capacity] = self._work_per_operation(capacity, stream, pinned=pinned)
            small, large = work[_SMALL], work[_LARGE]
            assert large <= _GROWTH * small, f"{name}: {small} grew to {large}"

    def _work_per_operation(self, capacity: int, stream: Stream, *, pinned: bool) -> float:
        """Return the work per access to a full tier: steps plus calls of ``evictable``."""
        tier = ModelTier(self.make_eviction(capacity=capacity))
        accesses = 6 * capacity
        keys = [_key(number) for number in stream(capacity, accesses, random.Random(6))]
        if pinned:
            tier.pinned.update(_key(number) for number in range(capacity // 2))
        for number in range(capacity):
            tier.access(_key(number))
        asked = tier.asked
        steps = count_steps(
            lambda: [tier.access(key) for key in keys],
            packages=packages_of(tier.eviction),
        )
        return (steps + tier.asked - asked) / accesses

    def _filled(self, members: int) -> tuple[Eviction, list[ChunkCopy], PolicyContext]:
        with noting(capacity=members):
            eviction, ctx = self.make_eviction(capacity=members), PolicyContext()
        copies = _make_copies(members)
        for copy in copies:
            eviction.on_miss(copy.key, ctx)
            eviction.on_insert(copy, ctx)
        return eviction, copies, ctx


def _key(number: int) -> ChunkKey:
    return make_key(number.to_bytes(8, "big"), 0)


def _keys(count: int) -> list[ChunkKey]:
    return [_key(number) for number in range(count)]


def _make_copies(count: int, *, start: int = 0) -> list[ChunkCopy]:
    copies = []
    for number in range(start, start + count):
        copy = ChunkCopy(_key(number), number)
        copy.state = CopyState.RESIDENT
        copies.append(copy)
    return copies


def _make_prompt(count: int) -> list[ChunkCopy]:
    """Return the copies of one prompt, root to leaf."""
    copies = _make_copies(count)
    for parent, copy in pairwise(copies):
        copy.parent, copy.depth = parent.key, parent.depth + 1
    return copies


def _pick_all(
    eviction: Eviction, ctx: PolicyContext, allowed: Iterable[ChunkCopy] | None = None
) -> list[ChunkCopy]:
    left = None if allowed is None else set(allowed)
    picked: list[ChunkCopy] = []
    while True:
        victim = eviction.pick(_any if left is None else left.__contains__, ctx)
        if victim is None:
            return picked
        picked.append(victim)
        if left is not None:
            left.discard(victim)


def _check_members(eviction: Eviction, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
    """Check that the policy picks each of ``copies`` once and nothing else."""
    picked = _pick_all(eviction, ctx)
    assert set(picked) == set(copies)
    assert len(picked) == len(copies)


def _any(copy: ChunkCopy) -> bool:
    return copy.state == CopyState.RESIDENT


def _none(copy: ChunkCopy) -> bool:
    return copy.state == CopyState.GONE
