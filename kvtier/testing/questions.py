"""What a manager asks a placement and its conditions, made up."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.keys import make_key
from kvtier.policies import ChunkCopy, CopyState, PolicyContext
from kvtier.policies.base import session_terms

__all__ = ["Question", "make_copies", "make_questions"]


@dataclass(frozen=True, slots=True)
class Question:
    """Some chunks of one moment.

    Attributes:
        now: When they are asked about, in seconds.
        tier: The slower tier in question.
        copies: Copies of the chunks, at least one.
    """

    now: float
    tier: int
    copies: Sequence[ChunkCopy]

    def set_scene(self, ctx: PolicyContext) -> None:
        """Put the moment into ``ctx``."""
        ctx.now = self.now
        ctx.request = f"request {self.now}"
        ctx.session = self.copies[0].session


def make_copies(
    numbers: Sequence[int], rng: random.Random, *, generation: int
) -> list[ChunkCopy]:
    """Return whole copies of the chunks ``numbers``, eight of which in a row are one prompt.

    Args:
        numbers: Which chunks.
        rng: Decides on hits.
        generation: Of the writes that made them; 0 for copies in a slower tier.
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


def make_questions(count: int, *, tiers: int, chunks: int, seed: int) -> list[Question]:
    """Return ``count`` questions, of which some are about the same chunks.

    Args:
        count: How many.
        tiers: Number of tiers, at least two.
        chunks: Number of different chunks.
        seed: Of the random numbers.
    """
    return list(_questions(count, tiers, chunks, random.Random(seed)))


def _questions(count: int, tiers: int, chunks: int, rng: random.Random) -> Iterator[Question]:
    now = 0.0
    for number in range(count):
        now += rng.choice((0.0, 0.5, 60.0, 7200.0))
        first = rng.randrange(chunks)
        numbers = [(first + at) % chunks for at in range(rng.randrange(1, 12))]
        tier = rng.randrange(1, tiers)
        # What leaves RAM bears the stamp of its write; what leaves a slower tier bears none.
        generation = number + 1 if tier == 1 or rng.random() < 0.5 else 0
        yield Question(now, tier, make_copies(numbers, rng, generation=generation))
