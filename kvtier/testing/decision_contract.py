"""What policies that answer questions about chunks promise alike: they decide, and no more."""

# ruff: noqa: D102 - the name of a test says what it shows
from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

from kvtier.policies import PolicyContext
from kvtier.testing.purity import contents_of, impure_calls
from kvtier.testing.questions import Question, make_questions

__all__ = ["TIERS", "DecisionContract", "some_questions"]

TIERS: Final = 3
"""Of the cache that the questions are about."""

Policy = TypeVar("Policy")
Answer = TypeVar("Answer")


def some_questions(count: int) -> Sequence[Question]:
    """Return ``count`` questions about chunks of which many come up again."""
    return make_questions(count, tiers=TIERS, chunks=96, seed=8)


class DecisionContract(ABC, Generic[Policy, Answer]):
    """The part of a contract that a placement's and an admission's share."""

    @abstractmethod
    def make_policy(self) -> Policy:
        """Return a new policy for a cache of :data:`TIERS` tiers."""

    @abstractmethod
    def answers(
        self, policy: Policy, question: Question, ctx: PolicyContext
    ) -> Sequence[Answer]:
        """Ask all that may be asked about the chunks of ``question``, at once."""

    @abstractmethod
    def answers_one_by_one(
        self, policy: Policy, question: Question, ctx: PolicyContext
    ) -> Sequence[Answer]:
        """Ask the same of each chunk by itself."""

    def test_batches_are_answered_like_single_chunks(self) -> None:
        single, batch = self.make_policy(), self.make_policy()
        one_ctx, many_ctx = PolicyContext(), PolicyContext()
        for question in some_questions(400):
            one_by_one = self.answers_one_by_one(single, question, one_ctx)
            assert self.answers(batch, question, many_ctx) == one_by_one
        drew_alike = one_ctx.rng.getstate() == many_ctx.rng.getstate()
        assert drew_alike, "asked one by one it drew another number of random numbers"

    def test_the_same_questions_get_the_same_answers(self) -> None:
        state = random.getstate()
        given: list[list[Sequence[Answer]]] = []
        for seed in (1, 2):
            random.seed(seed)
            policy, ctx = self.make_policy(), PolicyContext()
            given.append([self.answers(policy, each, ctx) for each in some_questions(400)])
        random.setstate(state)
        # One by one: where CI is set, pytest draws up how whole lists differ, for minutes.
        for first, again in zip(*given, strict=True):
            assert first == again

    def test_it_decides_and_does_nothing_else(self) -> None:
        policy, ctx = self.make_policy(), PolicyContext()
        questions = some_questions(100)
        with impure_calls(ctx.rng) as found:
            for question in questions:
                self.answers(policy, question, ctx)
                self.answers_one_by_one(policy, question, ctx)
        assert not found, f"it called {sorted(set(found))}"

    def test_copies_and_context_are_read_only(self) -> None:
        policy, ctx = self.make_policy(), PolicyContext()
        for question in some_questions(100):
            before = [contents_of(copy) for copy in question.copies]
            self.answers(policy, question, ctx)
            assert [contents_of(copy) for copy in question.copies] == before
            assert (ctx.now, ctx.session) == (question.now, question.copies[0].session)
