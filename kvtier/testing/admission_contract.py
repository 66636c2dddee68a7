"""What every admission policy promises, as a suite to inherit.

::

    class TestSecondTouch(AdmissionContract):
        def make_admission(self, *, capacity: int) -> SecondTouch:
            return SecondTouch(capacity)
"""

# ruff: noqa: D102 - the name of a test says what it shows
from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Final

from typing_extensions import override

from kvtier.policies import Admission, PolicyContext
from kvtier.testing.counting import (
    count_entries,
    count_steps,
    packages_of,
)
from kvtier.testing.decision_contract import TIERS, DecisionContract, some_questions
from kvtier.testing.purity import held_by
from kvtier.testing.questions import Question, make_questions

__all__ = ["AdmissionContract"]

_CAPACITY: Final = 48
_ENTRIES_PER_SLOT, _ENTRIES_OF_EMPTY = 8, 256
_SMALL, _LARGE, _GROWTH = 40, 640, 1.5
"""Chunks of two caches, and how much more work per chunk there may be in the larger one."""


class AdmissionContract(DecisionContract[Admission, bool]):
    """Inherit as ``TestX`` and say how to make the policy.

    Attributes:
        keys_per_slot: Most keys the policy remembers for each tier, in capacities.
    """

    keys_per_slot: ClassVar[int] = 1

    @abstractmethod
    def make_admission(self, *, capacity: int) -> Admission:
        """Return a new policy; RAM and the largest tier together have ``capacity`` slots."""

    @override
    def make_policy(self) -> Admission:
        return self.make_admission(capacity=_CAPACITY)

    @override
    def answers(self, policy: Admission, question: Question, ctx: PolicyContext) -> list[bool]:
        question.set_scene(ctx)
        return list(policy.admits_many(question.copies, question.tier, ctx))

    @override
    def answers_one_by_one(
        self, policy: Admission, question: Question, ctx: PolicyContext
    ) -> list[bool]:
        question.set_scene(ctx)
        return [policy.admits(copy, question.tier, ctx) for copy in question.copies]

    def test_an_answer_is_yes_or_no(self) -> None:
        admission, ctx = self.make_policy(), PolicyContext()
        for question in some_questions(100):
            assert all(
                isinstance(answer, bool) for answer in self.answers(admission, question, ctx)
            )

    def test_each_tier_is_judged_by_itself(self) -> None:
        alone, both = self.make_policy(), self.make_policy()
        ctx, same_ctx, other_ctx = PolicyContext(), PolicyContext(), PolicyContext()
        for question in some_questions(400):
            if question.tier == 1:
                there = Question(question.now, 2, question.copies)
                self.answers(both, there, other_ctx)
                assert self.answers(both, question, same_ctx) == self.answers(
                    alone, question, ctx
                )

    def test_what_it_remembers_is_in_proportion_to_the_cache_and_no_copy(self) -> None:
        admission, ctx = self.make_policy(), PolicyContext()
        for question in make_questions(2000, tiers=TIERS, chunks=8000, seed=3):
            self.answers(admission, question, ctx)
        slots = (TIERS - 1) * _CAPACITY
        copies, keys = held_by(admission)
        assert not copies, "it keeps copies"
        assert keys <= self.keys_per_slot * slots
        most = _ENTRIES_PER_SLOT * max(self.keys_per_slot, 1) * slots + _ENTRIES_OF_EMPTY
        assert count_entries(admission) <= most

    def test_the_work_per_chunk_does_not_grow_with_the_cache(self) -> None:
        small, large = self._work_per_chunk(_SMALL), self._work_per_chunk(_LARGE)
        assert large <= _GROWTH * small, f"{small} grew to {large}"

    def _work_per_chunk(self, capacity: int) -> float:
        """Count the policy's steps per chunk once it has seen many more than fit."""
        admission, ctx = self.make_admission(capacity=capacity), PolicyContext()
        chunks = 20 * _LARGE
        for question in make_questions(2 * capacity, tiers=TIERS, chunks=chunks, seed=4):
            self.answers(admission, question, ctx)
        asked = make_questions(300, tiers=TIERS, chunks=chunks, seed=5)
        steps = count_steps(
            lambda: [self.answers(admission, question, ctx) for question in asked],
            packages=packages_of(admission),
        )
        return steps / sum(len(question.copies) for question in asked)
