"""The contract refuses policies that are wrong in ways that are easy to overlook."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import pytest

from kvtier.policies import ChunkCopy, Eviction, PolicyContext
from kvtier.policies.base import Evictable
from kvtier.testing.eviction_contract import EvictionContract

VICTIMS_LEAVE = "test_a_batch_of_victims_leaves_and_is_of_those_that_may_go"
LIKE_SINGLE_CALLS = "test_batches_among_pins_do_what_calls_for_one_chunk_do"


class Plain(Eviction):
    """LRU as one would write it down, and right."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[ChunkCopy, None] = OrderedDict()

    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._order[copy] = None

    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._order.move_to_end(copy)

    def on_remove(self, copy: ChunkCopy) -> None:
        del self._order[copy]

    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        for _ in range(len(self._order)):
            copy, _none = self._order.popitem(last=False)
            if evictable(copy):
                return copy
            self._order[copy] = None
        return None


class TakesPinned(Plain):
    """Asks nobody whether a copy may go."""

    def pick_many(
        self, count: int, evictable: Evictable, ctx: PolicyContext
    ) -> list[ChunkCopy]:
        few = min(count, len(self._order))
        return [self._order.popitem(last=False)[0] for _ in range(few)]


class KeepsVictims(Plain):
    """Says who should go and has them in its order still."""

    def pick_many(
        self, count: int, evictable: Evictable, ctx: PolicyContext
    ) -> list[ChunkCopy]:
        return [copy for copy in self._order if evictable(copy)][:count]


class TakesOneMore(Plain):
    """Picks more than it was asked for."""

    def pick_many(
        self, count: int, evictable: Evictable, ctx: PolicyContext
    ) -> list[ChunkCopy]:
        return super().pick_many(count + 1, evictable, ctx)


class TakesNewest(Plain):
    """Has another order for many than for one."""

    def pick_many(
        self, count: int, evictable: Evictable, ctx: PolicyContext
    ) -> list[ChunkCopy]:
        newest = [copy for copy in reversed(self._order) if evictable(copy)][:count]
        for copy in newest:
            del self._order[copy]
        return newest


class UsesBackwards(Plain):
    """Notes the last use of a batch first."""

    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        super().on_hit_many(reversed(list(copies)), ctx)


class InsertsBackwards(Plain):
    """Lets the last of a batch in first."""

    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        super().on_insert_many(copies[::-1], ctx)


def run_contract(policy: type[Eviction], name: str) -> None:
    """Run the test ``name`` of the contract on ``policy``."""

    class Contract(EvictionContract):
        def make_eviction(self, *, capacity: int) -> Eviction:
            return policy(capacity)

    getattr(Contract(), name)()


@pytest.mark.parametrize(
    ("policy", "test"),
    [
        (TakesPinned, VICTIMS_LEAVE),
        (TakesPinned, LIKE_SINGLE_CALLS),
        (KeepsVictims, VICTIMS_LEAVE),
        (KeepsVictims, LIKE_SINGLE_CALLS),
        (TakesOneMore, VICTIMS_LEAVE),
        (TakesNewest, LIKE_SINGLE_CALLS),
        (UsesBackwards, LIKE_SINGLE_CALLS),
        (InsertsBackwards, LIKE_SINGLE_CALLS),
    ],
)
def test_a_bad_policy_fails(policy: type[Eviction], test: str) -> None:
    run_contract(Plain, test)
    with pytest.raises(AssertionError):
        run_contract(policy, test)
