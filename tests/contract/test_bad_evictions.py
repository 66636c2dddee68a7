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
ENTERS_FROM_AN_END = "test_a_prompt_that_comes_as_a_batch_enters_from_either_end"
NOT_ASKED_AGAIN = "test_rejected_candidates_are_not_asked_again_at_every_pick"
NO_GROWTH = "test_the_work_per_operation_does_not_grow_with_the_tier"


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


class AtRandom(Eviction):
    """Picks any copy, by the random numbers of the context."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._members: list[ChunkCopy] = []
        self._places: dict[ChunkCopy, int] = {}

    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        at = ctx.rng.randrange(len(self._members) + 1)
        self._members.append(copy)
        self._places[copy] = len(self._members) - 1
        self._swap(at, len(self._members) - 1)

    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._swap(self._places[copy], ctx.rng.randrange(len(self._members)))

    def on_remove(self, copy: ChunkCopy) -> None:
        self._swap(self._places[copy], len(self._members) - 1)
        self._members.pop()
        del self._places[copy]

    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        for left in range(len(self._members), 0, -1):
            copy = self._members[ctx.rng.randrange(left)]
            if evictable(copy):
                self.on_remove(copy)
                return copy
            self._swap(self._places[copy], left - 1)
        return None

    def _swap(self, one: int, other: int) -> None:
        members = self._members
        members[one], members[other] = members[other], members[one]
        self._places[members[one]], self._places[members[other]] = one, other


class NeedsRoom(Plain):
    """Cannot be made for a small tier."""

    def __init__(self, capacity: int) -> None:
        if capacity < 100:
            raise ValueError("too small")
        super().__init__(capacity)


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


class TearsPrompts(Plain):
    """Lets every other chunk of a prompt in before the rest."""

    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        super().on_insert_many(sorted(copies, key=lambda copy: copy.depth % 2), ctx)


class ByStamp(Eviction):
    """LRU that looks at every copy for each victim, in one line."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._stamps: dict[ChunkCopy, int] = {}
        self._clock = 0

    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self.on_hit(copy, ctx)

    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._clock += 1
        self._stamps[copy] = self._clock

    def on_remove(self, copy: ChunkCopy) -> None:
        del self._stamps[copy]

    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        victim = self._oldest(evictable)
        if victim is not None:
            del self._stamps[victim]
        return victim

    def _oldest(self, evictable: Evictable) -> ChunkCopy | None:
        raise NotImplementedError


class Sorts(ByStamp):
    """Sorts all copies."""

    def _oldest(self, evictable: Evictable) -> ChunkCopy | None:
        return next(filter(evictable, sorted(self._stamps, key=self._stamps.__getitem__)), None)


class Minimum(ByStamp):
    """Takes the least of all copies."""

    def _oldest(self, evictable: Evictable) -> ChunkCopy | None:
        oldest = min(self._stamps, key=self._stamps.__getitem__, default=None)
        return oldest if oldest is not None and evictable(oldest) else None


class Copies(ByStamp):
    """Makes a list of all copies."""

    def _oldest(self, evictable: Evictable) -> ChunkCopy | None:
        return next(filter(evictable, list(self._stamps)), None)


class InList(Eviction):
    """LRU whose order is a list, of which every use and victim is cut out."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: list[ChunkCopy] = []

    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._order.append(copy)

    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        self._order.remove(copy)
        self._order.append(copy)

    def on_remove(self, copy: ChunkCopy) -> None:
        self._order.remove(copy)

    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        for _ in range(len(self._order)):
            copy = self._order.pop(0)
            if evictable(copy):
                return copy
            self._order.append(copy)
        return None


class FifoInList(InList):
    """Takes from the wrong end of a list."""

    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        pass


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
        (TearsPrompts, ENTERS_FROM_AN_END),
    ],
)
def test_a_bad_policy_fails(policy: type[Eviction], test: str) -> None:
    with pytest.raises(AssertionError):
        run_contract(policy, test)


@pytest.mark.parametrize("policy", [Sorts, Minimum, Copies, InList, FifoInList])
def test_work_in_c_is_work(policy: type[Eviction]) -> None:
    # Without pins: all that grows there is what a single line walks through.
    with pytest.raises(AssertionError, match="scan: "):
        run_contract(policy, NO_GROWTH)


def test_a_failure_shows_the_values_that_were_compared() -> None:
    with pytest.raises(AssertionError, match=r"assert \d+ <= \(?\d+"):
        run_contract(Sorts, NOT_ASKED_AGAIN)


@pytest.mark.parametrize("test", [name for name in dir(EvictionContract) if "test_" in name])
def test_a_policy_may_draw_random_numbers(test: str) -> None:
    run_contract(AtRandom, test)


def test_a_failure_names_the_capacity_or_the_stream() -> None:
    with pytest.raises(ValueError, match="too small") as filled:
        run_contract(NeedsRoom, VICTIMS_LEAVE)
    with pytest.raises(AssertionError) as growing:
        run_contract(Sorts, NO_GROWTH)
    assert filled.value.__notes__ == ["with capacity=8"]
    assert "scan: " in str(growing.value)


@pytest.mark.parametrize(
    "test", [VICTIMS_LEAVE, LIKE_SINGLE_CALLS, ENTERS_FROM_AN_END, NO_GROWTH]
)
def test_a_plain_one_passes(test: str) -> None:
    run_contract(Plain, test)
