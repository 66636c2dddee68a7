"""What every placement policy promises, as a suite to inherit.

::

    class TestLadder(PlacementContract):
        def make_placement(self, *, tiers: int) -> LadderPlacement:
            return LadderPlacement(tiers)
"""

# ruff: noqa: D102 - the name of a test says what it shows
from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Final

from typing_extensions import override

from kvtier.policies import Placement, PolicyContext, Promotion
from kvtier.testing.counting import (
    count_entries,
    count_steps,
    packages_of,
)
from kvtier.testing.decision_contract import TIERS, DecisionContract, some_questions
from kvtier.testing.naming import naming
from kvtier.testing.purity import held_by
from kvtier.testing.questions import Question, make_questions
from kvtier.types import Purpose

__all__ = ["PlacementContract"]

_ENTRIES_PER_KEY, _ENTRIES_OF_EMPTY = 8, 256
_GROWTH: Final = 1.5
"""How much more work per chunk there may be after many chunks than at first."""


class PlacementContract(DecisionContract[Placement, object]):
    """Inherit as ``TestX`` and say how to make the policy.

    Attributes:
        most_keys: Most keys the policy remembers of chunks that it was asked about.
    """

    most_keys: ClassVar[int] = 0

    @abstractmethod
    def make_placement(self, *, tiers: int) -> Placement:
        """Return a new policy for a cache of ``tiers`` tiers, RAM included; 1 to 4 of them."""

    @override
    def make_policy(self) -> Placement:
        return self.make_placement(tiers=TIERS)

    @override
    def answers(
        self, policy: Placement, question: Question, ctx: PolicyContext
    ) -> list[object]:
        question.set_scene(ctx)
        copies, tier = question.copies, question.tier
        return [
            [tuple(places) for places in policy.place_many(copies, ctx)],
            list(policy.admit_many(copies, tier, Purpose.DEMOTE, ctx)),
            list(policy.promote_many(copies, tier, ctx)),
            list(policy.demote_many(copies, tier - 1, ctx)),
        ]

    @override
    def answers_one_by_one(
        self, policy: Placement, question: Question, ctx: PolicyContext
    ) -> list[object]:
        question.set_scene(ctx)
        copies, tier = question.copies, question.tier
        return [
            [tuple(policy.place(copy, ctx)) for copy in copies],
            [policy.admit(copy, tier, Purpose.DEMOTE, ctx) for copy in copies],
            [policy.promote(copy, tier, ctx) for copy in copies],
            [policy.demote(copy, tier - 1, ctx) for copy in copies],
        ]

    def test_it_knows_the_number_of_tiers(self) -> None:
        for tiers in (1, 2, 3, 4):
            with naming(tiers=tiers):
                assert self.make_placement(tiers=tiers).tiers == tiers

    def test_places_are_slower_tiers_once_each(self) -> None:
        for tiers in (1, 2, 3, 4):
            with naming(tiers=tiers):
                placement, ctx = self.make_placement(tiers=tiers), PolicyContext()
                for question in some_questions(60):
                    question.set_scene(ctx)
                    for places in placement.place_many(question.copies, ctx):
                        assert set(places) <= set(range(1, tiers))
                        assert all(isinstance(tier, int) for tier in places)
                        assert len(set(places)) == len(places)

    def test_what_leaves_goes_to_a_target_that_was_announced(self) -> None:
        for tiers in (1, 2, 3, 4):
            for source in range(tiers):
                with naming(tiers=tiers, source=source):
                    self._check_targets(tiers, source)

    def test_a_promotion_is_a_promotion_and_an_admission_yes_or_no(self) -> None:
        placement, ctx = self.make_policy(), PolicyContext()
        for question in some_questions(60):
            question.set_scene(ctx)
            copies, tier = question.copies, question.tier
            ways = placement.promote_many(copies, tier, ctx)
            assert all(isinstance(way, Promotion) for way in ways)
            assert all(type(way.stay) is type(way.keep_source) is bool for way in ways)
            answers = placement.admit_many(copies, tier, Purpose.DEMOTE, ctx)
            assert all(isinstance(answer, bool) for answer in answers)

    def test_what_holds_for_all_chunks_never_changes(self) -> None:
        placement, ctx = self.make_policy(), PolicyContext()
        before = _of_all_chunks(placement)
        assert isinstance(placement.places_used, bool)
        assert isinstance(placement.min_chunks, int)
        assert placement.min_chunks >= 1
        for question in some_questions(60):
            self.answers(placement, question, ctx)
            assert _of_all_chunks(placement) == before

    def test_what_it_remembers_is_bounded_and_no_copy(self) -> None:
        placement, ctx = self.make_policy(), PolicyContext()
        chunks = 1000 + 3 * self.most_keys
        for question in make_questions(chunks, tiers=TIERS, chunks=4 * chunks, seed=3):
            self.answers(placement, question, ctx)
        copies, keys = held_by(placement)
        assert not copies, "it keeps copies"
        assert keys <= self.most_keys
        most = _ENTRIES_PER_KEY * self.most_keys + _ENTRIES_OF_EMPTY
        assert count_entries(placement) <= most

    def test_the_work_per_chunk_does_not_grow(self) -> None:
        placement, ctx = self.make_policy(), PolicyContext()
        many = 200 + self.most_keys
        chunks = 100 * many

        def work(seed: int, count: int) -> float:
            asked = make_questions(count, tiers=TIERS, chunks=chunks, seed=seed)
            steps = count_steps(
                lambda: [self.answers(placement, question, ctx) for question in asked],
                packages=packages_of(placement),
            )
            return steps / sum(len(question.copies) for question in asked)

        first = work(seed=4, count=100)
        for question in make_questions(many, tiers=TIERS, chunks=chunks, seed=5):
            self.answers(placement, question, ctx)
        assert work(seed=6, count=100) <= _GROWTH * first

    def _check_targets(self, tiers: int, source: int) -> None:
        placement, ctx = self.make_placement(tiers=tiers), PolicyContext()
        targets = placement.demotion_targets(source, tiers)
        assert set(targets) <= set(range(source + 1, tiers))
        for question in some_questions(40):
            question.set_scene(ctx)
            answers = placement.demote_many(question.copies, source, ctx)
            assert {*answers} - {None} <= {*targets}
            assert all(isinstance(to, int | None) for to in (*answers, *targets))


def _of_all_chunks(placement: Placement) -> list[object]:
    targets = [tuple(placement.demotion_targets(source, TIERS)) for source in range(TIERS)]
    return [placement.places_used, placement.min_chunks, targets]
