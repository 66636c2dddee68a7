"""The common contract of placement and admission policies."""

# ruff: noqa: D102 - the name of a test says what it shows
from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kvtier.keys import make_key
from kvtier.policies import ChunkCopy, CopyState, PolicyContext
from kvtier.policies.base import session_terms
from kvtier.testing.probes import (
    count_entries,
    count_steps,
    fields_of,
    held_by,
    impure_calls,
    packages_of,
)

__all__ = [
    "GROWTH",
    "TIERS",
    "DecisionContract",
    "Query",
    "make_copies",
    "make_queries",
]

TIERS: Final = 3
"""Number of tiers of the cache."""
GROWTH: Final = 1.5
"""Largest accepted growth of the steps per chunk when the cache gets larger or older."""
_ENTRIES_PER_KEY, _ENTRIES_OF_EMPTY = 8, 256

Policy = TypeVar("Policy")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Query:
    """A query to a policy about some chunks.

    Attributes:
        now: Time of the query in seconds.
        tier: Index of the slower tier.
        copies: Copies of the chunks, at least one.
    """

    now: float
    tier: int
    copies: Sequence[ChunkCopy]

    def apply_to(self, ctx: PolicyContext) -> None:
        """Set the time, request and session of ``ctx``."""
        ctx.now = self.now
        ctx.request = f"request {self.now}"
        ctx.session = self.copies[0].session


def make_copies(
    numbers: Sequence[int], rng: random.Random, *, generation: int
) -> list[ChunkCopy]:
    """Return resident copies of the chunks ``numbers``. Each prompt has eight chunks.

    ``rng`` draws the hit counts. ``generation`` is 0 for copies in a slower tier than RAM.
    """
    copies = []
    for number in numbers:
        parent = make_key((number - 1).to_bytes(8, "big"), 0) if number % 8 else None
        copy = ChunkCopy(
            make_key(number.to_bytes(8, "big"), 0), number, parent, number % 8, generation
        )
        copy.state = CopyState.RESIDENT
        copy.hits = max(rng.randrange(-3, 4), 0)
        copy.terms = session_terms(f"session {number // 64}")
        copies.append(copy)
    return copies


def make_queries(count: int, *, chunks: int = 96, seed: int = 8) -> list[Query]:
    """Return ``count`` random queries about ``chunks`` chunks and :data:`TIERS` tiers."""
    rng, now, queries = random.Random(seed), 0.0, list[Query]()
    for number in range(count):
        now += rng.choice((0.0, 0.5, 60.0, 7200.0))
        first = rng.randrange(chunks)
        numbers = [(first + at) % chunks for at in range(rng.randrange(1, 12))]
        tier = rng.randrange(1, TIERS)
        # Copies in RAM have the generation of their write; those in slower tiers have none.
        generation = number + 1 if tier == 1 or rng.random() < 0.5 else 0
        queries.append(Query(now, tier, make_copies(numbers, rng, generation=generation)))
    return queries


class DecisionContract(ABC, Generic[Policy, Answer]):
    """Tests that every placement or admission policy must pass."""

    @abstractmethod
    def make_policy(self) -> Policy:
        """Return a new policy for a cache of :data:`TIERS` tiers."""

    @abstractmethod
    def answers(self, policy: Policy, query: Query, ctx: PolicyContext) -> Sequence[Answer]:
        """Return the answers to ``query`` by the policy's methods for batches."""

    @abstractmethod
    def answers_one_by_one(
        self, policy: Policy, query: Query, ctx: PolicyContext
    ) -> Sequence[Answer]:
        """Return the answers to ``query`` by the policy's methods for single chunks."""

    def steps_per_chunk(
        self, policy: Policy, ctx: PolicyContext, queries: Sequence[Query]
    ) -> float:
        """Return the mean number of steps that ``policy`` takes per chunk of ``queries``."""
        steps = count_steps(
            lambda: [self.answers(policy, query, ctx) for query in queries],
            packages=packages_of(policy),
        )
        return steps / sum(len(query.copies) for query in queries)

    def check_memory(self, policy: Policy, *, most_keys: int, slots: int = 0) -> None:
        """Check that ``policy`` refers to no copies and to at most ``most_keys`` keys.

        The limit for other objects grows with the keys, or with the ``slots`` of the cache.
        """
        copies, keys = held_by(policy)
        assert not copies, "it keeps copies"
        assert keys <= most_keys
        most = _ENTRIES_PER_KEY * max(most_keys, slots) + _ENTRIES_OF_EMPTY
        assert count_entries(policy) <= most

    def test_batches_are_answered_like_single_chunks(self) -> None:
        single, batch = self.make_policy(), self.make_policy()
        one_ctx, many_ctx = PolicyContext(), PolicyContext()
        for query in make_queries(400):
            one_by_one = self.answers_one_by_one(single, query, one_ctx)
            assert self.answers(batch, query, many_ctx) == one_by_one
        drew_alike = one_ctx.rng.getstate() == many_ctx.rng.getstate()
        assert drew_alike, "single calls and batches draw different numbers of random numbers"

    def test_the_same_questions_get_the_same_answers(self) -> None:
        state = random.getstate()
        given: list[list[Sequence[Answer]]] = []
        for seed in (1, 2):
            random.seed(seed)
            policy, ctx = self.make_policy(), PolicyContext()
            given.append([self.answers(policy, each, ctx) for each in make_queries(400)])
        random.setstate(state)
        # Compared one by one: pytest would take minutes to show how long lists differ.
        for first, again in zip(*given, strict=True):
            assert first == again

    def test_it_decides_and_does_nothing_else(self) -> None:
        policy, ctx = self.make_policy(), PolicyContext()
        queries = make_queries(100)
        with impure_calls(ctx.rng) as found:
            for query in queries:
                self.answers(policy, query, ctx)
                self.answers_one_by_one(policy, query, ctx)
        assert not found, f"it called {sorted(set(found))}"

    def test_copies_and_context_are_read_only(self) -> None:
        policy, ctx = self.make_policy(), PolicyContext()
        for query in make_queries(100):
            before = [fields_of(copy) for copy in query.copies]
            self.answers(policy, query, ctx)
            assert [fields_of(copy) for copy in query.copies] == before
            assert (ctx.now, ctx.session) == (query.now, query.copies[0].session)
