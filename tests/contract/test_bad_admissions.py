"""The contract refuses admission policies that are wrong in subtle ways."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Sequence
from math import inf
from typing import Any

import pytest
from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies import Admission, ChunkCopy, PolicyContext
from kvtier.testing.admission_contract import AdmissionContract, BudgetContract
from tests.contract.contract_tests import (
    LIKE_SINGLE_CALLS,
    PURE,
    READS_ONLY,
    SAME_ANSWERS,
)

DAY_S = 86_400.0


class Third(Admission):
    """Refuses a chunk twice before it lets it in, and is right."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._refused: dict[int, OrderedDict[ChunkKey, int]] = {}

    @override
    def admits(self, copy: ChunkCopy, tier: int, ctx: PolicyContext) -> bool:
        refused = self._refused.setdefault(self._book(tier), OrderedDict())
        times = refused.pop(copy.key, 0)
        if times == 2:
            return True
        refused[copy.key] = times + 1
        self._bound(refused)
        return False

    def _book(self, tier: int) -> int:
        return tier

    def _bound(self, refused: OrderedDict[ChunkKey, int]) -> None:
        if len(refused) > self.capacity:
            refused.popitem(last=False)


class OneBook(Third):
    """Takes the second tier's question about a chunk for its second use."""

    @override
    def _book(self, tier: int) -> int:
        return 0


class NeverForgets(Third):
    @override
    def _bound(self, refused: OrderedDict[ChunkKey, int]) -> None:
        pass


class ForgetsByCounting(Third):
    """Looks at all it remembers to see whether that is too much."""

    @override
    def _bound(self, refused: OrderedDict[ChunkKey, int]) -> None:
        if len(list(refused)) > self.capacity:
            refused.popitem(last=False)


class LastFirst(Third):
    """Answers a batch from its end, so that another key is forgotten."""

    @override
    def admits_many(
        self, copies: Sequence[ChunkCopy], tier: int, ctx: PolicyContext
    ) -> Sequence[bool]:
        return super().admits_many(copies[::-1], tier, ctx)[::-1]


class Fewer(Third):
    """Leaves out who is refused."""

    @override
    def admits_many(
        self, copies: Sequence[ChunkCopy], tier: int, ctx: PolicyContext
    ) -> Sequence[bool]:
        return [answer for answer in super().admits_many(copies, tier, ctx) if answer]


class Hits(Third):
    """Answers with a number."""

    @override
    def admits(self, copy: ChunkCopy, tier: int, ctx: PolicyContext) -> bool:
        return copy.hits  # type: ignore[return-value]


class Lots(Third):
    @override
    def admits(self, copy: ChunkCopy, tier: int, ctx: PolicyContext) -> bool:
        return random.random() < 0.5


class Night(Third):
    """Writes at night, by the clock on the wall."""

    @override
    def admits(self, copy: ChunkCopy, tier: int, ctx: PolicyContext) -> bool:
        return time.localtime().tm_hour < 6


class Marks(Third):
    @override
    def admits(self, copy: ChunkCopy, tier: int, ctx: PolicyContext) -> bool:
        copy.hits += 1
        return True


class Holds(Third):
    _last: Any = None

    @override
    def admits(self, copy: ChunkCopy, tier: int, ctx: PolicyContext) -> bool:
        self._last = copy
        return True


class Budget(Admission):
    """As many as the budget has since it was last full, which is when it is."""

    chunks_per_day = 50

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._spent: dict[int, tuple[float, int]] = {}

    @override
    def admits(self, copy: ChunkCopy, tier: int, ctx: PolicyContext) -> bool:
        since, spent = self._spent.get(tier, (-inf, 0))
        if self._is_over(since, ctx.now):
            since, spent = ctx.now, 0
        admitted = spent < self.chunks_per_day
        self._spent[tier] = since, spent + admitted
        return admitted

    def _is_over(self, since: float, now: float) -> bool:
        # Half of it at the end of one span and half at the beginning of the next is twice that.
        return now - since >= 2 * DAY_S


class ByTheCalendar(Budget):
    """A new budget at midnight, so that the hours around it see two."""

    @override
    def _is_over(self, since: float, now: float) -> bool:
        return since == -inf or since // DAY_S < now // DAY_S


class OneTooMany(Budget):
    chunks_per_day = 51


class Closed(Budget):
    """Never lets anything in, which is not what a budget is for."""

    chunks_per_day = 0


ADMISSION_BOUNDED = "test_its_memory_is_in_proportion_to_the_cache_and_has_no_copy"
BUDGET = "test_no_day_exceeds_the_budget_whenever_it_begins"


def check_admission(policy: type[Admission], test: str) -> None:
    """Run one test of the contract on ``policy``."""

    class Contract(BudgetContract):
        chunks_per_day = 50

        def make_admission(self, *, capacity: int) -> Admission:
            return policy(capacity)

    getattr(Contract(), test)()


BAD_ADMISSIONS: list[tuple[type[Admission], str]] = [
    (OneBook, "test_each_tier_is_judged_by_itself"),
    (NeverForgets, ADMISSION_BOUNDED),
    (Holds, ADMISSION_BOUNDED),
    (ForgetsByCounting, "test_the_work_per_chunk_does_not_grow_with_the_cache"),
    (LastFirst, LIKE_SINGLE_CALLS),
    (Fewer, LIKE_SINGLE_CALLS),
    (Hits, "test_an_answer_is_yes_or_no"),
    (Lots, SAME_ANSWERS),
    (Lots, PURE),
    (Night, PURE),
    (Marks, READS_ONLY),
    (Third, BUDGET),
    (ByTheCalendar, BUDGET),
    (OneTooMany, BUDGET),
    (Closed, BUDGET),
]


@pytest.mark.parametrize(("policy", "test"), BAD_ADMISSIONS)
def test_a_bad_admission_fails(policy: type[Admission], test: str) -> None:
    with pytest.raises(AssertionError):
        check_admission(policy, test)


@pytest.mark.parametrize("name", [name for name in dir(AdmissionContract) if "test_" in name])
def test_a_plain_admission_passes(name: str) -> None:
    check_admission(Third, name)


def test_a_plain_budget_passes() -> None:
    check_admission(Budget, BUDGET)
