"""Every built-in eviction policy keeps the contract; the LRU ones are exactly that."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.keys import ChunkKey, make_key
from kvtier.policies import ChunkCopy, CopyState, Eviction, PolicyContext, build_eviction
from kvtier.policies.eviction import Lru
from kvtier.policies.registry import EVICTIONS
from kvtier.testing.eviction_contract import EvictionContract
from kvtier.testing.model_tier import ModelTier


# The tests below and test_bad_evictions.py go through the same lines at a third of the cost.
@pytest.mark.untraced
class TestBuiltIn(EvictionContract):
    @pytest.fixture(params=sorted(EVICTIONS.built_in), autouse=True)
    def name(self, request: pytest.FixtureRequest) -> None:
        self._name: str = request.param
        if self._name == "lhd":  # objects for each prompt, and here each chunk is one
            self.entries_per_slot = 16

    def make_eviction(self, *, capacity: int) -> Eviction:
        return build_eviction(self._name, capacity=capacity)


MOST_VICTIMS = {"evict": 1, "evict 3": 3}
PINS = st.lists(
    st.tuples(
        st.sampled_from(
            ["access", "access", "access", "pin", "unpin", "evict", "evict 3", "remove"]
        ),
        st.integers(0, 15),
    ),
    max_size=120,
)


@pytest.mark.parametrize("name", sorted(EVICTIONS.built_in))
@given(steps=PINS, capacity=st.integers(1, 8))
def test_no_pinned_chunk_is_evicted_and_every_idle_one_can_be(
    name: str, steps: list[tuple[str, int]], capacity: int
) -> None:
    tier = ModelTier(build_eviction(name, capacity=capacity))
    for what, number in steps:
        key, allowed, members = key_of(number), tier.may_go(), set(tier.members)
        tier.asked = 0
        if what == "access":
            room = len(members) < capacity or bool(allowed)
            assert tier.access(key) is (key in members or room)
        elif what == "pin":
            tier.pinned.add(key)
        elif what == "unpin":
            tier.pinned.discard(key)
        elif what in MOST_VICTIMS:
            assert evicted(tier, what) == min(MOST_VICTIMS[what], len(allowed))
        elif key in members:
            tier.remove(key)
        gone = members - set(tier.members)
        assert gone <= (allowed if what != "remove" else {key})
        assert tier.asked <= len(members) * MOST_VICTIMS.get(what, 1) + 1
    tier.pinned.clear()
    for _ in range(len(tier.members)):
        assert tier.evict() is not None
    assert tier.evict() is None


def evicted(tier: ModelTier, what: str) -> int:
    if what == "evict":
        return int(tier.evict() is not None)
    return len(tier.evict_many(MOST_VICTIMS[what]))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "hit", "hit many", "remove", "pick", "pick unpinned"]),
        st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True),
    ),
    max_size=150,
)


@given(steps=STEPS, pinned=st.sets(st.integers(0, 7)))
def test_lru_evicts_what_a_plain_ordered_dict_would(
    steps: list[tuple[str, list[int]]], pinned: set[int]
) -> None:
    lru, model, ctx = Lru(8), OrderedDict[int, ChunkCopy](), PolicyContext()
    for what, numbers in steps:
        members = [number for number in numbers if number in model]
        if what == "insert":
            insert(lru, model, [number for number in numbers if number not in model], ctx)
        elif what in {"hit", "hit many"}:
            touch(lru, model, members, ctx)
        elif what == "remove" and members:
            copy = model.pop(members[0])
            copy.state = CopyState.GONE
            lru.on_remove(copy)
        elif what.startswith("pick"):
            keep = pinned if what == "pick unpinned" else set()
            assert lru.pick(lambda copy: copy.slot not in keep, ctx) is expected(model, keep)  # noqa: B023 - called before the next turn
    while model:
        assert lru.pick(lambda copy: True, ctx) is model.popitem(last=False)[1]
    assert lru.pick(lambda copy: True, ctx) is None


def insert(
    lru: Lru, model: OrderedDict[int, ChunkCopy], numbers: list[int], ctx: PolicyContext
) -> None:
    copies = [ChunkCopy(make_key(bytes([number]), 0), number) for number in numbers]
    for copy in copies:
        copy.state = CopyState.RESIDENT
        model[copy.slot] = copy
    if len(copies) == 1:
        lru.on_insert(copies[0], ctx)
    else:
        lru.on_insert_many(copies, ctx)


def touch(
    lru: Lru, model: OrderedDict[int, ChunkCopy], members: list[int], ctx: PolicyContext
) -> None:
    for number in members:
        model.move_to_end(number)
    if len(members) == 1:
        lru.on_hit(model[members[0]], ctx)
    else:
        lru.on_hit_many([model[number] for number in members], ctx)


def expected(model: OrderedDict[int, ChunkCopy], keep: set[int]) -> ChunkCopy | None:
    """The oldest that may go; those met before it count as just used."""
    for number in list(model):
        if number not in keep:
            return model.pop(number)
        model.move_to_end(number)
    return None


def test_a_scan_that_finds_nothing_leaves_the_order_as_it_was() -> None:
    lru, ctx = Lru(4), PolicyContext()
    copies = [ChunkCopy(make_key(bytes([number]), 0), number) for number in range(4)]
    for copy in copies:
        copy.state = CopyState.RESIDENT
    lru.on_insert_many(copies, ctx)
    assert lru.pick(lambda copy: False, ctx) is None
    assert [lru.pick(lambda copy: True, ctx) for _ in copies] == copies


def key_of(number: int) -> ChunkKey:
    return make_key(bytes([number]), 0)
