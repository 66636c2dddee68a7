"""The slot allocator keeps what belongs together together, and loses nothing."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.manager.slots import SlotAllocator

FEW_LOOKS: Final = 8


def holes(*extents: tuple[int, int], capacity: int = 64) -> SlotAllocator:
    """Return an allocator whose free extents are exactly ``extents``."""
    slots = SlotAllocator(capacity)
    slots.allocate(capacity)
    for first, last in extents:
        slots.release(range(first, last + 1))
    return slots


def test_a_new_allocator_is_one_free_extent() -> None:
    slots = SlotAllocator(10)
    assert (slots.free, slots.capacity, slots.extents()) == (10, 10, [(0, 10)])


def test_a_tier_without_slots_has_nothing_to_give() -> None:
    slots = SlotAllocator(0)
    assert (slots.free, slots.extents(), slots.allocate(0)) == (0, [], [])
    with pytest.raises(ValueError, match="1 slots requested, 0 free"):
        slots.allocate(1)


def test_an_allocation_is_contiguous_while_an_extent_is_long_enough() -> None:
    slots = holes((20, 24), (10, 16), (0, 2))
    assert slots.allocate(5) == [20, 21, 22, 23, 24]
    assert slots.allocate(7) == [10, 11, 12, 13, 14, 15, 16]


def test_the_smallest_extent_that_fits_is_preferred_to_the_long_one() -> None:
    slots = holes((0, 31), (40, 41))
    assert slots.allocate(2) == [40, 41]
    assert slots.extents() == [(0, 32)]


def test_an_extent_of_the_same_power_of_two_is_only_taken_if_it_is_long_enough() -> None:
    slots = holes((0, 4), (10, 16))
    assert slots.allocate(6) == [10, 11, 12, 13, 14, 15]


def test_without_a_long_extent_the_longest_ones_are_split_over_and_slots_ascend() -> None:
    slots = holes((0, 0), (20, 23), (10, 17))
    assert slots.allocate(10) == [10, 11, 12, 13, 14, 15, 16, 17, 20, 21]
    assert slots.extents() == [(0, 1), (22, 24)]


def test_too_large_an_allocation_takes_nothing() -> None:
    slots = holes((3, 5))
    with pytest.raises(ValueError, match="4 slots requested, 3 free"):
        slots.allocate(4)
    assert (slots.free, slots.extents()) == (3, [(3, 6)])


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (1, 3, 2), (2, 1, 3)], ids=str)
def test_freed_neighbours_merge_in_any_order(order: tuple[int, ...]) -> None:
    slots = holes(capacity=8)
    for slot in order:
        slots.release([slot])
    assert slots.extents() == [(1, 4)]


def test_slots_are_released_in_any_order_and_merge_on_both_sides() -> None:
    slots = holes((0, 1), (6, 7), capacity=8)
    slots.release([5, 2, 4, 3])
    assert (slots.free, slots.extents()) == (8, [(0, 8)])


def test_given_slots_are_taken_out_of_the_middle() -> None:
    slots = SlotAllocator(10)
    slots.take([7, 2, 3])
    assert slots.extents() == [(0, 2), (4, 7), (8, 10)]
    slots.take([0, 1, 9])
    assert (slots.free, slots.extents()) == (4, [(4, 7), (8, 9)])


def test_slots_are_taken_from_an_extent_that_is_not_the_newest() -> None:
    slots = holes((0, 9), (20, 29), (40, 49))
    slots.take([4])
    assert slots.extents() == [(0, 4), (5, 10), (20, 30), (40, 50)]


@pytest.mark.parametrize("wanted", [[5], [1, 2, 3, 4, 5], [64], [-1]], ids=str)
def test_taking_what_is_not_free_is_an_error(wanted: list[int]) -> None:
    slots = holes((0, 4), (6, 9))
    with pytest.raises(ValueError, match="not all free"):
        slots.take(wanted)
    assert slots.extents() == [(0, 5), (6, 10)]


@given(lengths=st.lists(st.integers(1, 9), max_size=40), asked=st.integers(0, 400))
def test_an_allocation_takes_one_run_where_a_few_looks_find_one_that_is_long_enough(
    lengths: list[int], asked: int
) -> None:
    ends = [0, *accumulate(lengths)]
    runs = list(pairwise(ends))[::2]  # the others are taken
    free = {slot for start, end in runs for slot in range(start, end)}
    slots = SlotAllocator(ends[-1])
    slots.take(set(range(ends[-1])) - free)
    count = asked % (len(free) + 2)
    if count > len(free):
        with pytest.raises(ValueError, match="requested"):
            slots.allocate(count)
        assert slots.extents() == runs
        return
    longest = max(lengths[::2], default=0)
    taken = slots.allocate(count)
    assert taken == sorted(set(taken) & free)
    assert len(taken) == count
    is_found = len(runs) <= FEW_LOOKS or longest >= 1 << count.bit_length()
    if 0 < count <= longest and is_found:
        assert taken[-1] - taken[0] == count - 1


class SlotMachine(RuleBasedStateMachine):
    """The allocator against a set of free slots."""

    @initialize(capacity=st.integers(0, 40))
    def start(self, capacity: int) -> None:
        self.slots = SlotAllocator(capacity)
        self.free = set(range(capacity))
        self.used: set[int] = set()

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        taken = self.slots.allocate(data.draw(st.integers(0, len(self.free))))
        assert self.free >= set(taken)
        self.move(set(taken), self.free, self.used)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from([-1, *sorted(self.used)]), unique=True))
        back = [slot for slot in chosen if slot >= 0]
        self.slots.release(back)
        self.move(set(back), self.used, self.free)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.sampled_from([-1, *sorted(self.free)]), max_size=6))
        self.slots.take(chosen - {-1})
        self.move(chosen - {-1}, self.free, self.used)

    def move(self, slots: set[int], source: set[int], target: set[int]) -> None:
        source -= slots
        target |= slots

    @invariant()
    def the_extents_are_the_free_slots_and_maximal(self) -> None:
        extents = self.slots.extents()
        assert {slot for start, end in extents for slot in range(start, end)} == self.free
        assert self.slots.free == len(self.free)
        starts = {start for start, _ in extents}
        assert not any(end in starts for _, end in extents)


TestSlotMachine = pytest.mark.untraced(SlotMachine.TestCase)


def test_a_full_tier_hands_what_it_was_given_back_out_in_order() -> None:
    """Whatever order victims left in: neighbours move in one call."""
    slots = SlotAllocator(4)
    slots.allocate(4)
    assert slots.exchange([3, 1, 2], 3) == [1, 2, 3]
    assert slots.free == 0
