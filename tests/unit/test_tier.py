"""One tier's books: what may leave, what may not, and when a slot is free again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, repeat

from kvtier.keys import ChunkKey
from kvtier.manager import TierState
from kvtier.policies import ChunkCopy, CopyState, Eviction, PolicyContext
from kvtier.policies.base import Evictable, RequestTerms
from kvtier.policies.eviction import Lru
from kvtier.testing.probes import fields_of
from tests.support.workbench import prefix

CTX = PolicyContext()


def make_tier(capacity: int = 4, eviction: Eviction | None = None) -> TierState:
    return TierState("ram", 0, capacity, eviction or Lru(capacity))


def fill(tier: TierState, keys: Sequence[ChunkKey]) -> list[ChunkCopy]:
    """Make ``keys``, a chain from its root, resident."""
    slots = tier.slots.allocate(len(keys))
    copies = tier.begin_writing(keys, slots, [None, *keys], count())
    tier.publish(copies, CTX)
    return copies


def make_room(tier: TierState, slots: int) -> list[ChunkCopy] | None:
    """Have so many slots free, and return the victims; None if too few are available."""
    if slots > tier.available:
        return None
    members = dict(tier.copies)
    taken, victims = tier.take_slots(slots, CTX)
    tier.slots.release(taken)
    return [members[key] for key in victims]


def test_a_copy_being_written_is_neither_a_hit_nor_a_victim() -> None:
    tier = make_tier(2)
    slots = tier.slots.allocate(2)
    copies = tier.begin_writing(prefix(2), slots, repeat(None), count())
    assert (tier.available, tier.idle, tier.writing) == (0, 0, 2)
    assert make_room(tier, 1) is None
    tier.publish(copies, CTX)
    assert (tier.available, tier.idle, tier.writing, tier.counters.stored) == (2, 2, 0, 2)


def test_a_write_that_failed_gives_its_slot_back() -> None:
    tier = make_tier(2)
    (copy,) = tier.begin_writing(prefix(1), tier.slots.allocate(1), [None], [0])
    tier.abort(copy)
    assert (tier.slots.free, tier.copies, copy.state) == (2, {}, CopyState.GONE)


def test_a_pinned_copy_stays_and_the_next_one_leaves() -> None:
    tier = make_tier(2)
    first, second = fill(tier, prefix(2))
    tier.pin([first])
    assert make_room(tier, 1) == [second]
    assert make_room(tier, 2) is None
    tier.unpin([first])
    assert make_room(tier, 2) == [first]


def test_a_new_chunk_takes_over_an_evicted_copy_but_never_a_dropped_one() -> None:
    tier = make_tier(1)
    (evicted,) = fill(tier, prefix(1))
    evicted.hits = evicted.origin = 7
    evicted.terms = RequestTerms(session="somebody's", store_tiers=frozenset({1}))
    make_room(tier, 1)
    (second,) = fill(tier, prefix(1, of=1))
    assert second is evicted
    new = ChunkCopy(prefix(1, of=1)[0], 0)
    new.state = CopyState.RESIDENT
    assert fields_of(second) == fields_of(new)
    tier.drop(second)
    (third,) = fill(tier, prefix(1, of=2))
    assert third is not second


def test_a_dirty_copy_stays_until_it_is_clean_as_often_as_it_was_marked() -> None:
    tier = make_tier(1)
    (copy,) = fill(tier, prefix(1))
    tier.mark_dirty([copy])
    tier.mark_dirty([copy])
    assert (tier.available, tier.dirty) == (0, 1)
    tier.mark_clean([copy])
    assert (tier.available, tier.dirty) == (0, 1)
    tier.mark_clean([copy])
    assert (tier.available, tier.dirty) == (1, 0)


def test_the_slot_of_a_dropped_copy_is_free_when_the_last_pin_is_gone() -> None:
    tier = make_tier(1)
    (copy,) = fill(tier, prefix(1))
    tier.pin([copy])
    tier.pin([copy])
    tier.drop(copy)
    tier.drop(copy)
    assert (tier.copies, tier.slots.free) == ({}, 0)
    tier.unpin([copy])
    assert tier.slots.free == 0
    tier.unpin([copy])
    assert tier.slots.free == 1


def test_a_dirty_copy_that_is_dropped_leaves_no_dirt_behind() -> None:
    tier = make_tier(1)
    (copy,) = fill(tier, prefix(1))
    tier.mark_dirty([copy])
    tier.drop(copy)
    assert (tier.dirty, tier.idle, tier.slots.free) == (0, 0, 1)


def test_a_leaving_copy_is_a_hit_that_comes_back_when_touched() -> None:
    tier = make_tier(2)
    (first,) = fill(tier, prefix(1))
    (second,) = fill(tier, prefix(1, of=1))
    tier.mark_dirty([first])
    assert tier.pick_leaving(1, CTX) == [first]
    assert first.key in tier.copies
    tier.touch([first], CTX)
    tier.restore([first], CTX)
    assert not tier.leaving
    tier.mark_clean([first])
    assert make_room(tier, 2) == [second, first]


def test_a_leaving_copy_that_is_wanted_stays_and_is_not_inserted_again() -> None:
    class Listening(Lru):
        def __init__(self, capacity: int) -> None:
            super().__init__(capacity)
            self.stayed: list[ChunkCopy] = []

        def on_stay(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
            self.stayed.append(copy)
            super().on_stay(copy, ctx)

    policy = Listening(8)
    tier = make_tier(8, policy)
    copies = fill(tier, prefix(8))
    assert tier.pick_leaving(3, CTX) == copies[:4:-1]
    tier.restore(tier.leading(prefix(8)), CTX)
    assert sorted(copy.depth for copy in policy.stayed) == [5, 6, 7]
    assert len(make_room(tier, 8) or ()) == 8


def test_a_leaving_copy_may_be_dropped() -> None:
    tier = make_tier(1)
    (copy,) = fill(tier, prefix(1))
    tier.mark_dirty([copy])
    tier.pick_leaving(1, CTX)
    tier.drop(copy)
    assert (tier.leaving, tier.slots.free) == (set(), 1)


def test_of_a_touched_prefix_the_root_stays_longest() -> None:
    tier = make_tier(3)
    copies = fill(tier, prefix(3))
    tier.touch(copies, CTX)
    assert make_room(tier, 3) == copies[::-1]


def test_a_policy_that_picks_too_few_victims_is_named_and_replaced() -> None:
    class Shy(Lru):
        def pick_many(
            self, count: int, evictable: Evictable, ctx: PolicyContext
        ) -> list[ChunkCopy]:
            return super().pick_many(min(count, 1), evictable, ctx)

    tier = make_tier(2, Shy(2))
    copies = fill(tier, prefix(2))
    assert set(make_room(tier, 2) or ()) == set(copies)
    assert (tier.idle, len(tier.copies)) == (0, 0)
    assert "Shy picks too few victims" in str(tier.policy_error)


def test_a_snapshot_does_not_change_afterwards() -> None:
    tier = make_tier(3)
    fill(tier, prefix(2))
    before = tier.snapshot()
    make_room(tier, 3)
    assert (before.used, before.resident, before.held, before.counters.evicted) == (2, 2, 0, 0)
    assert tier.snapshot().counters.evicted == 2


def test_requested_slots_are_the_largest_request_up_to_the_capacity() -> None:
    tier = make_tier(4)
    tier.request_slots(2)
    tier.request_slots(1)
    assert tier.requested_slots == 2
    tier.request_slots(100)
    assert tier.requested_slots == 4
