"""The contract refuses placement policies that are wrong in subtle ways."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest
from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.policies import ChunkCopy, Placement, PolicyContext, Promotion
from kvtier.testing.placement_contract import PlacementContract
from tests.contract.contract_tests import (
    LIKE_SINGLE_CALLS,
    PURE,
    READS_ONLY,
    SAME_ANSWERS,
)


class Plain(Placement):
    """Sends the heads of prompts down at once and the rest when it leaves, and is right."""

    @override
    def place(self, copy: ChunkCopy, ctx: PolicyContext) -> Sequence[int]:
        return range(1, self.tiers) if copy.depth < 2 else ()

    @override
    def promote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> Promotion:
        return Promotion.COPY if copy.hits > 0 else Promotion.MOVE

    @override
    def demote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> int | None:
        return source + 1 if source + 1 < self.tiers else None


class DoesNotAskItsBase(Plain):
    def __init__(self, tiers: int) -> None:
        super().__init__(3)


class PlacesInRam(Plain):
    @override
    def place(self, copy: ChunkCopy, ctx: PolicyContext) -> Sequence[int]:
        return range(self.tiers)


class PlacesTwice(Plain):
    @override
    def place(self, copy: ChunkCopy, ctx: PolicyContext) -> Sequence[int]:
        return [tier for tier in (1, 1) if tier < self.tiers]


class CountsFromOne(Plain):
    """Takes the slowest tier's number for the number of tiers."""

    @override
    def place(self, copy: ChunkCopy, ctx: PolicyContext) -> Sequence[int]:
        return range(1, self.tiers + 1)


class LeavesTheLastTier(Plain):
    @override
    def demote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> int | None:
        return source + 1


class SurprisesTheManager(Plain):
    """Says that victims go nowhere, and sends them somewhere."""

    @override
    def demotion_targets(self, source: int) -> Sequence[int]:
        return ()


class TargetsAbove(Plain):
    @override
    def demotion_targets(self, source: int) -> Sequence[int]:
        return range(self.tiers)


class ChangesTargets(Plain):
    """Drops a target once something was placed."""

    _placed = False

    @override
    def place(self, copy: ChunkCopy, ctx: PolicyContext) -> Sequence[int]:
        self._placed = True
        return ()

    @override
    def demotion_targets(self, source: int) -> Sequence[int]:
        return range(source + 1, self.tiers - self._placed)


class ChangesUses(Plain):
    """Learns whether to be asked at each use."""

    _deep = False

    @property
    @override
    def places_used(self) -> bool:
        return self._deep

    @override
    def place(self, copy: ChunkCopy, ctx: PolicyContext) -> Sequence[int]:
        self._deep |= copy.depth > 0
        return ()


class SaysWhere(Plain):
    """Answers with a tier where a promotion is due."""

    @override
    def promote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> Promotion:
        return 0  # type: ignore[return-value]


class AnswersForOne(Plain):
    """Gives one answer for all."""

    @override
    def demote_many(
        self, copies: Sequence[ChunkCopy], source: int, ctx: PolicyContext
    ) -> Sequence[int | None]:
        return [self.demote(copies[0], source, ctx)]


class DrawsLots(Plain):
    @override
    def place(self, copy: ChunkCopy, ctx: PolicyContext) -> Sequence[int]:
        return (1,) if self.tiers > 1 and random.random() < 0.5 else ()


class DrawsNumbers(Plain):
    """Has a generator of its own: seeded, so the same every time, and not the driver's."""

    def __init__(self, tiers: int) -> None:
        super().__init__(tiers)
        self._rng = random.Random(1)

    @override
    def promote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> Promotion:
        return self._rng.choice([Promotion.COPY, Promotion.MOVE])


class ReadsTheClock(Plain):
    @override
    def promote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> Promotion:
        return Promotion.COPY if time.monotonic() > 0 else Promotion.MOVE


class LooksAtTheDisk(Plain):
    @override
    def place(self, copy: ChunkCopy, ctx: PolicyContext) -> Sequence[int]:
        return range(1, self.tiers) if Path("/").exists() else ()


class WritesToCopies(Plain):
    @override
    def place(self, copy: ChunkCopy, ctx: PolicyContext) -> Sequence[int]:
        copy.policy = "seen"
        return ()


class SetsTheScene(Plain):
    @override
    def place(self, copy: ChunkCopy, ctx: PolicyContext) -> Sequence[int]:
        ctx.session = ""
        return ()


class KeepsCopies(Plain):
    def __init__(self, tiers: int) -> None:
        super().__init__(tiers)
        self._latest: deque[ChunkCopy] = deque(maxlen=8)

    @override
    def place(self, copy: ChunkCopy, ctx: PolicyContext) -> Sequence[int]:
        self._latest.append(copy)
        return ()


class CountsForEver(Plain):
    def __init__(self, tiers: int) -> None:
        super().__init__(tiers)
        self._uses: dict[ChunkKey, int] = {}

    @override
    def place(self, copy: ChunkCopy, ctx: PolicyContext) -> Sequence[int]:
        self._uses[copy.key] = self._uses.get(copy.key, 0) + 1
        return ()


class LogsDepths(Plain):
    """Remembers no keys, and does not stop remembering."""

    def __init__(self, tiers: int) -> None:
        super().__init__(tiers)
        self._depths: list[int] = []

    @override
    def place(self, copy: ChunkCopy, ctx: PolicyContext) -> Sequence[int]:
        self._depths.append(copy.depth)
        return (1,) if self.tiers > 1 and copy.depth < self._mean() else ()

    def _mean(self) -> float:
        return self._depths[-1]


class LooksBack(LogsDepths):
    """Looks at all it remembers each time."""

    @override
    def _mean(self) -> float:
        return sum(self._depths) / len(self._depths)


PLACES = "test_places_are_slower_tiers_once_each"
TARGETS = "test_victims_are_demoted_to_declared_targets"
CONSTANT = "test_what_holds_for_all_chunks_never_changes"
TYPES = "test_a_promotion_is_a_promotion"
BOUNDED = "test_its_memory_is_bounded_and_has_no_copy"
NO_GROWTH = "test_the_work_per_chunk_does_not_grow"


def check_placement(policy: type[Placement], test: str) -> None:
    """Run one test of the contract on ``policy``."""

    class Contract(PlacementContract):
        def make_placement(self, *, tiers: int) -> Placement:
            return policy(tiers)

    getattr(Contract(), test)()


BAD_PLACEMENTS: list[tuple[type[Placement], str]] = [
    (DoesNotAskItsBase, "test_it_knows_the_number_of_tiers"),
    (PlacesInRam, PLACES),
    (PlacesTwice, PLACES),
    (CountsFromOne, PLACES),
    (LeavesTheLastTier, TARGETS),
    (SurprisesTheManager, TARGETS),
    (TargetsAbove, TARGETS),
    (ChangesTargets, CONSTANT),
    (ChangesUses, CONSTANT),
    (SaysWhere, TYPES),
    (AnswersForOne, LIKE_SINGLE_CALLS),
    (DrawsLots, SAME_ANSWERS),
    (DrawsLots, PURE),
    (DrawsNumbers, PURE),
    (ReadsTheClock, PURE),
    (LooksAtTheDisk, PURE),
    (WritesToCopies, READS_ONLY),
    (SetsTheScene, READS_ONLY),
    (KeepsCopies, BOUNDED),
    (CountsForEver, BOUNDED),
    (LogsDepths, BOUNDED),
    (LooksBack, NO_GROWTH),
]


@pytest.mark.parametrize(("policy", "test"), BAD_PLACEMENTS)
def test_a_bad_placement_fails(policy: type[Placement], test: str) -> None:
    with pytest.raises(AssertionError):
        check_placement(policy, test)


@pytest.mark.parametrize(
    ("policy", "test", "configuration"),
    [
        (PlacesInRam, PLACES, "with tiers=1"),
        (LeavesTheLastTier, TARGETS, "with tiers=1, source=0"),
    ],
)
def test_a_failure_names_the_configuration_that_failed(
    policy: type[Placement], test: str, configuration: str
) -> None:
    with pytest.raises(AssertionError) as caught:
        check_placement(policy, test)
    assert caught.value.__notes__ == [configuration]


@pytest.mark.parametrize("test", sorted({test for _, test in BAD_PLACEMENTS}))
def test_a_plain_placement_passes(test: str) -> None:
    check_placement(Plain, test)
