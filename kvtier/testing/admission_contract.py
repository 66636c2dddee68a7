"""The contracts of admission policies, as test classes to inherit.

::

    class TestSecondTouch(AdmissionContract):
        def make_admission(self, *, capacity: int) -> SecondTouch:
            return SecondTouch(capacity)
"""

# ruff: noqa: D102 - the name of a test says what it shows
from __future__ import annotations

import random
from abc import abstractmethod
from bisect import bisect_left
from typing import ClassVar, Final

from typing_extensions import override

from kvtier.policies import Admission, PolicyContext
from kvtier.testing.decision_contract import (
    GROWTH,
    TIERS,
    DecisionContract,
    Query,
    make_copies,
    make_queries,
)

__all__ = ["AdmissionContract", "BudgetContract"]

_CAPACITY: Final = 48
_DAY_S: Final = 86_400.0
_SMALL, _LARGE = 40, 640
"""Capacities of the two caches to compare, in chunks."""


class AdmissionContract(DecisionContract[Admission, bool]):
    """Tests that every admission policy must pass.

    Inherit as ``TestX`` and implement :meth:`make_admission`.

    Attributes:
        keys_per_slot: Largest number of keys that the policy keeps per slot of a tier.
    """

    keys_per_slot: ClassVar[int] = 1

    @abstractmethod
    def make_admission(self, *, capacity: int) -> Admission:
        """Return a new policy. ``capacity`` counts the slots of RAM and the largest tier."""

    @override
    def make_policy(self) -> Admission:
        return self.make_admission(capacity=_CAPACITY)

    @override
    def answers(self, policy: Admission, query: Query, ctx: PolicyContext) -> list[bool]:
        query.apply_to(ctx)
        return list(policy.admits_many(query.copies, query.tier, ctx))

    @override
    def answers_one_by_one(
        self, policy: Admission, query: Query, ctx: PolicyContext
    ) -> list[bool]:
        query.apply_to(ctx)
        return [policy.admits(copy, query.tier, ctx) for copy in query.copies]

    def test_an_answer_is_yes_or_no(self) -> None:
        admission, ctx = self.make_policy(), PolicyContext()
        for query in make_queries(100):
            assert all(
                isinstance(answer, bool) for answer in self.answers(admission, query, ctx)
            )

    def test_each_tier_is_judged_by_itself(self) -> None:
        alone, both = self.make_policy(), self.make_policy()
        ctx, same_ctx, other_ctx = PolicyContext(), PolicyContext(), PolicyContext()
        for query in make_queries(400):
            if query.tier == 1:
                there = Query(query.now, 2, query.copies)
                self.answers(both, there, other_ctx)
                assert self.answers(both, query, same_ctx) == self.answers(alone, query, ctx)

    def test_its_memory_is_in_proportion_to_the_cache_and_has_no_copy(self) -> None:
        admission, ctx = self.make_policy(), PolicyContext()
        for query in make_queries(2000, chunks=8000, seed=3):
            self.answers(admission, query, ctx)
        slots = (TIERS - 1) * _CAPACITY
        self.check_memory(admission, most_keys=self.keys_per_slot * slots, slots=slots)

    def test_the_work_per_chunk_does_not_grow_with_the_cache(self) -> None:
        small, large = self._work_per_chunk(_SMALL), self._work_per_chunk(_LARGE)
        assert large <= GROWTH * small, f"{small} grew to {large}"

    def _work_per_chunk(self, capacity: int) -> float:
        """Return the steps per chunk of a policy that has seen more keys than it can keep."""
        admission, ctx = self.make_admission(capacity=capacity), PolicyContext()
        chunks = 20 * _LARGE
        for query in make_queries(2 * capacity, chunks=chunks, seed=4):
            self.answers(admission, query, ctx)
        asked = make_queries(300, chunks=chunks, seed=5)
        return self.steps_per_chunk(admission, ctx, asked)


class BudgetContract(AdmissionContract):
    """Tests that every policy with a daily limit on writes must pass.

    Inherit as ``TestX``, implement :meth:`make_admission` and set ``chunks_per_day``.

    Attributes:
        chunks_per_day: Largest number of chunks that the policy admits to one tier in 24 hours.
    """

    chunks_per_day: ClassVar[int]

    def test_no_day_exceeds_the_budget_whenever_it_begins(self) -> None:
        for quiet_s in (0.0, 0.8 * _DAY_S, 10 * _DAY_S):
            for tier, admitted in self._admitted(quiet_s).items():
                days = [
                    bisect_left(admitted, begin + _DAY_S) - at
                    for at, begin in enumerate(admitted)
                ]
                assert admitted, f"tier {tier}, {quiet_s=}: nothing is ever admitted"
                assert max(days) <= self.chunks_per_day, f"tier {tier}, {quiet_s=}"

    def _admitted(self, quiet_s: float) -> dict[int, list[float]]:
        """Send more chunks than the budget allows; return the times of admission by tier.

        After half of the requests there is a pause of ``quiet_s`` seconds.
        """
        admission, ctx = self.make_admission(capacity=64), PolicyContext()
        admitted: dict[int, list[float]] = {1: [], 2: []}
        copies = make_copies(range(40), random.Random(9), generation=1)
        rounds = round(3 * _DAY_S / 1000)
        for number in range(rounds):
            ctx.now = number * 1000 + (quiet_s if number > rounds // 2 else 0.0)
            for tier, times in admitted.items():
                answers = admission.admits_many(copies, tier, ctx)
                times.extend(ctx.now for answer in answers if answer)
        return admitted
