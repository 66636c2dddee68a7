"""Every built-in eviction policy keeps the contract; Lru is exactly least recently used."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.keys import make_key
from kvtier.policies import ChunkCopy, CopyState, Eviction, PolicyContext, build_eviction
from kvtier.policies.eviction import Lru
from kvtier.testing.eviction_contract import EvictionContract


class TestLru(EvictionContract):
    def make_eviction(self, *, capacity: int) -> Eviction:
        return build_eviction("lru", capacity=capacity)


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


def test_the_registry_finds_lru_and_names_what_there_is_otherwise() -> None:
    assert isinstance(build_eviction("lru", capacity=3), Lru)
    with pytest.raises(ConfigError, match=r"'mru'.*lru"):
        build_eviction("mru", capacity=3)
