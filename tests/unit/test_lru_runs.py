"""LRU takes runs of copies in the order in which it would take them one by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from kvtier.policies import ChunkCopy, CopyState, PolicyContext
from kvtier.policies.base import is_evictable, is_unpinned
from kvtier.policies.eviction import Lru


@pytest.mark.parametrize("test", [is_evictable, is_unpinned, lambda copy: not copy.pins])
def test_a_run_is_what_single_picks_would_be(test: Callable[[ChunkCopy], bool]) -> None:
    rng, ctx, lru = random.Random(7), PolicyContext(), Lru(64)
    members: list[ChunkCopy] = []
    for number in range(400):
        fresh = [ChunkCopy(f"{number}.{i}".encode(), i) for i in range(rng.randrange(4))]
        for copy in fresh:
            copy.state = CopyState.RESIDENT
        lru.on_insert_many(fresh, ctx)
        members += fresh
        lru.on_hit_many(rng.choices(members, k=3) if members else [], ctx)
        for copy in members:
            copy.pins, copy.dirty = rng.random() < 0.2, rng.random() < 0.2
        if members and rng.random() < 0.2:
            gone = members.pop(rng.randrange(len(members)))
            gone.state = CopyState.GONE
            lru.on_remove(gone)
        assert set(lru.order()) == set(members)
        count = rng.randrange(6)
        expected = [copy for copy in lru.order() if test(copy)][:count]
        picked = lru.pick_many(count, test, ctx)
        assert picked == expected
        members = [copy for copy in members if copy not in picked]


def test_uses_of_any_part_of_a_prompt_keep_each_copy_once() -> None:
    rng, ctx = random.Random(5), PolicyContext()
    for _ in range(200):
        lru, chain = Lru(8), [ChunkCopy(bytes([at]), at) for at in range(8)]
        for before, copy in pairwise(chain):
            copy.parent = before.key
        members: set[ChunkCopy] = set()
        for _ in range(20):
            part = chain[rng.randrange(8) : rng.randrange(9)][::-1]
            if members.issuperset(part):
                lru.on_hit_many(part, ctx)
            elif members.isdisjoint(part):
                for copy in part:
                    copy.state, copy.queued = CopyState.RESIDENT, 0
                lru.on_insert_many(part, ctx)
                members.update(part)
            elif rng.random() < 0.5:
                members.difference_update(lru.pick_many(rng.randrange(3), is_evictable, ctx))
            assert len(lru.order()) == len(members)
            assert set(lru.order()) == members
        picked = lru.pick_many(9, is_evictable, ctx)
        assert len(picked) == len(members)
        assert set(picked) == members
