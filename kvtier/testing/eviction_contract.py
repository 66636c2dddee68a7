"""What every eviction policy promises, as a suite to inherit.

::

    class TestLru(EvictionContract):
        def make_eviction(self, *, capacity: int) -> Lru:
            return Lru(capacity)
"""

# ruff: noqa: D102 - the name of a test says what it shows
from __future__ import annotations

import gc
import types
from abc import ABC, abstractmethod
from collections.abc import Iterable

from kvtier.keys import make_key
from kvtier.policies import ChunkCopy, CopyState, Eviction, PolicyContext

__all__ = ["EvictionContract"]

_ENTRIES_PER_SLOT = 8
_ENTRIES_OF_EMPTY = 256


class EvictionContract(ABC):
    """Inherit as ``TestX`` and say how to make the policy."""

    @abstractmethod
    def make_eviction(self, *, capacity: int) -> Eviction:
        """Return a new policy for a tier of ``capacity`` slots."""

    def test_what_was_inserted_is_picked_once_each(self) -> None:
        eviction, copies, ctx = self._filled(8)
        picked = _pick_all(eviction, ctx)
        assert set(picked) == set(copies)
        assert len(picked) == len(copies)
        assert eviction.pick(_any, ctx) is None

    def test_a_hit_neither_adds_nor_removes_a_member(self) -> None:
        eviction, copies, ctx = self._filled(8)
        for copy in (*copies[:4], *copies[:4], copies[6]):
            eviction.on_hit(copy, ctx)
        picked = _pick_all(eviction, ctx)
        assert set(picked) == set(copies)
        assert len(picked) == len(copies)

    def test_only_evictable_copies_are_picked(self) -> None:
        eviction, copies, ctx = self._filled(8)
        allowed = set(copies[::3])
        picked = _pick_all(eviction, ctx, allowed)
        assert set(picked) == allowed

    def test_a_rejected_copy_stays_a_member(self) -> None:
        eviction, copies, ctx = self._filled(4)
        assert eviction.pick(_none, ctx) is None
        assert set(_pick_all(eviction, ctx)) == set(copies)

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
        again = _pick_all(eviction, ctx)
        assert set(again) == set(copies)
        assert len(again) == len(copies)

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
        batch = self.make_eviction(capacity=8)
        batches = _make_copies(8)
        batch.on_insert_many(batches, ctx)
        for copy in singles[2:6]:
            single.on_hit(copy, ctx)
        batch.on_hit_many(iter(batches[2:6]), ctx)
        order = [copy.key for copy in _pick_all(single, ctx)]
        assert [copy.key for copy in _pick_all(batch, ctx)] == order

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
        # Linear with a generous factor; asking the pinned half each time would be 131,072.
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
        assert _entries(eviction) <= _ENTRIES_PER_SLOT * capacity + _ENTRIES_OF_EMPTY

    def test_memory_stays_in_proportion_when_copies_come_and_go_unused(self) -> None:
        capacity = 16
        eviction, ctx = self.make_eviction(capacity=capacity), PolicyContext()
        for number in range(5000):
            copy = _make_copies(1, start=number)[0]
            eviction.on_insert(copy, ctx)
            copy.state = CopyState.GONE
            eviction.on_remove(copy)
        assert _entries(eviction) <= _ENTRIES_PER_SLOT * capacity + _ENTRIES_OF_EMPTY
        assert eviction.pick(_any, ctx) is None

    def _filled(self, members: int) -> tuple[Eviction, list[ChunkCopy], PolicyContext]:
        eviction, ctx = self.make_eviction(capacity=members), PolicyContext()
        copies = _make_copies(members)
        for copy in copies:
            eviction.on_miss(copy.key, ctx)
            eviction.on_insert(copy, ctx)
        return eviction, copies, ctx


def _make_copies(count: int, *, start: int = 0) -> list[ChunkCopy]:
    copies = []
    for number in range(start, start + count):
        copy = ChunkCopy(make_key(number.to_bytes(8, "big"), 0), number)
        copy.state = CopyState.RESIDENT
        copies.append(copy)
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


def _any(copy: ChunkCopy) -> bool:
    return copy.state == CopyState.RESIDENT


def _none(copy: ChunkCopy) -> bool:
    return copy.state == CopyState.GONE


def _entries(root: object) -> int:
    """Count what a policy's containers hold, nested ones and its own objects included."""
    opaque = (type, types.ModuleType, types.FunctionType, ChunkCopy, bytes, str, int, float)
    seen: set[int] = set()
    pending: list[object] = [root]
    entries = 0
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, opaque):
            continue
        seen.add(id(item))
        held = gc.get_referents(item)
        entries += len(held)
        pending += held
    return entries
