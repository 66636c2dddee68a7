"""What a store keeps from eviction until a time, across restarts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtier.tiers.slab.index_reader import IndexReader
from kvtier.tiers.slab.inspect import find_namespaces
from kvtier.tiers.slab.maintain import hold, retain_chunks
from tests.unit.cache_shell import Shell
from tests.unit.stores import KEYS, Store

LATER = 1 << 40
"""Seconds since the epoch, far in the future."""


@pytest.fixture
def filled(store: Store) -> Iterator[Store]:
    yield store.filled()
    store.stop()


def retain(store: Store, slots: list[int], *, until: int = LATER, quota: int = 16) -> int:
    """Retain what is in ``slots``, the first as the most important."""
    (space,) = find_namespaces(store.root)
    with hold(space, "stop it"):
        with IndexReader(space, idle=True) as reader:
            by_slot = {entry.slot: entry for entry in reader.entries("stored", -1)}
        entries = [by_slot[slot] for slot in slots]
        return retain_chunks(space, entries, until, quota_chunks=quota)


def test_an_engine_learns_at_its_start_what_to_retain_and_until_when(filled: Store) -> None:
    assert retain(filled, [3, 1]) == 2
    assert len(filled.start()) == 16
    assert filled.tier.retained() == {1: LATER, 3: LATER}


def test_a_chunk_stays_retained_over_any_number_of_restarts(filled: Store) -> None:
    retain(filled, [3])
    for _ in range(3):
        filled.start()
        assert filled.tier.retained() == {3: LATER}
        filled.stop()


def test_a_chunk_whose_time_is_over_is_not_retained(filled: Store) -> None:
    retain(filled, [3], until=1)
    filled.start()
    assert filled.tier.retained() == {}


def test_a_slot_with_another_chunk_is_not_retained(filled: Store) -> None:
    retain(filled, [3, 4])
    filled.start()
    filled.put([KEYS[20]], [3])
    filled.stop()
    filled.start()
    assert filled.tier.retained() == {4: LATER}


def test_a_reset_ends_it_even_if_generations_come_again(filled: Store) -> None:
    retain(filled, list(range(16)))
    filled.start(keep_after_reset=True)
    filled.reset()
    filled.stop()
    filled.start(keep_after_reset=True)
    filled.fill()
    filled.stop()
    assert len(filled.start(keep_after_reset=True)) == 16
    assert filled.tier.retained() == {}


def test_the_quota_holds_for_all_that_is_retained_and_the_first_go_first(
    filled: Store,
) -> None:
    assert retain(filled, [0, 1], quota=4) == 2
    assert retain(filled, [5, 6, 7], quota=4) == 2
    assert retain(filled, [5, 6], quota=4) == 2
    filled.start()
    assert sorted(filled.tier.retained()) == [0, 1, 5, 6]


def test_stat_says_what_is_retained(filled: Store, shell: Shell) -> None:
    (space,) = shell.json("stat", filled.root)["namespaces"]
    assert (space["retained_chunks"], space["retained_until"]) == (0, None)
    until = 4_102_444_800  # 2100-01-01
    retain(filled, [3, 1], until=until)
    (space,) = shell.json("stat", filled.root)["namespaces"]
    assert (space["retained_chunks"], space["retained_until"]) == (2, until)
    ran = shell("stat", filled.root)
    assert "retained" in ran.out
    assert "2 chunks, until 2100-01-01 00:00:00 UTC at the latest" in ran.out


def test_an_index_that_never_retained_is_as_before(filled: Store) -> None:
    tables = filled.sql("SELECT name FROM sqlite_master WHERE type = 'table'")
    assert sorted(name for (name,) in tables) == ["chunks", "meta", "removals"]
    filled.start()
    assert filled.tier.retained() == {}
