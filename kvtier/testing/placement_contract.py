"""What every placement policy promises, as a suite to inherit.

::

    class TestLadder(PlacementContract):
        def make_placement(self, *, tiers: int) -> LadderPlacement:
            return LadderPlacement(tiers)
"""

# ruff: noqa: D102 - the name of a test says what it shows
from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final

from kvtier.policies import Placement, PolicyContext, Promotion
from kvtier.testing.counting import (
    count_entries,
    count_steps,
    packages_of,
    skip_if_compiled,
)
from kvtier.testing.purity import contents_of, held_by, impure_calls
from kvtier.testing.questions import Question, make_questions, serve_traffic
from kvtier.testing.workbench import Workbench
from kvtier.types import Why

__all__ = ["PlacementContract"]

_TIERS: Final = 3
_ENTRIES_PER_KEY, _ENTRIES_OF_EMPTY = 8, 256
_GROWTH: Final = 1.5
"""How much more work per chunk there may be after many chunks than at first."""

Answers = list[object]


class PlacementContract(ABC):
    """Inherit as ``TestX`` and say how to make the policy.

    Attributes:
        most_keys: Most keys the policy remembers of chunks that it was asked about.
    """

    most_keys: ClassVar[int] = 0

    @abstractmethod
    def make_placement(self, *, tiers: int) -> Placement:
        """Return a new policy for a cache of ``tiers`` tiers, RAM included; 1 to 4 of them."""

    def test_it_knows_the_number_of_tiers(self) -> None:
        for tiers in (1, 2, 3, 4):
            assert self.make_placement(tiers=tiers).tiers == tiers

    def test_places_are_slower_tiers_once_each(self) -> None:
        for tiers in (1, 2, 3, 4):
            placement, ctx = self.make_placement(tiers=tiers), PolicyContext()
            for question in _questions(60):
                question.set_scene(ctx)
                for places in placement.place_many(question.copies, ctx):
                    assert set(places) <= set(range(1, tiers))
                    assert len(set(places)) == len(places)

    def test_what_leaves_goes_to_a_target_that_was_announced(self) -> None:
        for tiers in (1, 2, 3, 4):
            placement, ctx = self.make_placement(tiers=tiers), PolicyContext()
            for source in range(tiers):
                targets = placement.demotion_targets(source, tiers)
                assert set(targets) <= set(range(source + 1, tiers))
                for question in _questions(40):
                    question.set_scene(ctx)
                    answers = placement.demote_many(question.copies, source, ctx)
                    assert {*answers} - {None} <= {*targets}

    def test_a_promotion_is_a_promotion_and_an_admission_yes_or_no(self) -> None:
        placement, ctx = self.make_placement(tiers=_TIERS), PolicyContext()
        for question in _questions(60):
            question.set_scene(ctx)
            copies, tier = question.copies, question.tier
            ways = placement.promote_many(copies, tier, ctx)
            assert all(isinstance(way, Promotion) for way in ways)
            answers = placement.admit_many(copies, tier, Why.DEMOTE, ctx)
            assert all(isinstance(answer, bool) for answer in answers)

    def test_what_holds_for_all_chunks_never_changes(self) -> None:
        placement, ctx = self.make_placement(tiers=_TIERS), PolicyContext()
        before = _of_all_chunks(placement)
        assert isinstance(placement.places_used, bool)
        assert placement.min_chunks >= 1
        for question in _questions(60):
            _answers(placement, question, ctx)
            assert _of_all_chunks(placement) == before

    def test_batches_are_answered_like_single_chunks(self) -> None:
        single, batch = (self.make_placement(tiers=_TIERS) for _ in range(2))
        one_ctx, many_ctx = PolicyContext(), PolicyContext()
        for question in _questions(200):
            one_by_one = _answers_one_by_one(single, question, one_ctx)
            assert _answers(batch, question, many_ctx) == one_by_one
        assert one_ctx.rng.getstate() == many_ctx.rng.getstate()

    def test_the_same_questions_get_the_same_answers(self) -> None:
        state = random.getstate()
        given: list[list[Answers]] = []
        for seed in (1, 2):
            random.seed(seed)
            placement, ctx = self.make_placement(tiers=_TIERS), PolicyContext()
            given.append([_answers(placement, question, ctx) for question in _questions(200)])
        random.setstate(state)
        assert given[0] == given[1]

    def test_it_decides_and_does_nothing_else(self) -> None:
        placement, ctx = self.make_placement(tiers=_TIERS), PolicyContext()
        skip_if_compiled(placement)
        questions = _questions(60)
        with impure_calls(ctx.rng) as found:
            for question in questions:
                _answers(placement, question, ctx)
                _answers_one_by_one(placement, question, ctx)
        assert not found, f"it called {sorted(set(found))}"

    def test_copies_and_context_are_read_only(self) -> None:
        placement, ctx = self.make_placement(tiers=_TIERS), PolicyContext()
        for question in _questions(60):
            before = [contents_of(copy) for copy in question.copies]
            _answers(placement, question, ctx)
            assert [contents_of(copy) for copy in question.copies] == before
            assert (ctx.now, ctx.session) == (question.now, question.copies[0].session)

    def test_what_it_remembers_is_bounded_and_no_copy(self) -> None:
        placement, ctx = self.make_placement(tiers=_TIERS), PolicyContext()
        chunks = 1000 + 3 * self.most_keys
        for question in make_questions(chunks, tiers=_TIERS, chunks=4 * chunks, seed=3):
            _answers(placement, question, ctx)
        copies, keys = held_by(placement)
        assert not copies, "it keeps copies"
        assert keys <= self.most_keys
        most = _ENTRIES_PER_KEY * self.most_keys + _ENTRIES_OF_EMPTY
        assert count_entries(placement) <= most

    def test_the_work_per_chunk_does_not_grow(self) -> None:
        placement, ctx = self.make_placement(tiers=_TIERS), PolicyContext()
        skip_if_compiled(placement)
        many = 200 + self.most_keys
        chunks = 100 * many

        def work(seed: int, count: int) -> float:
            asked = make_questions(count, tiers=_TIERS, chunks=chunks, seed=seed)
            steps = count_steps(
                lambda: [_answers(placement, question, ctx) for question in asked],
                packages=packages_of(placement),
            )
            return steps / sum(len(question.copies) for question in asked)

        first = work(seed=4, count=100)
        for question in make_questions(many, tiers=_TIERS, chunks=chunks, seed=5):
            _answers(placement, question, ctx)
        assert work(seed=6, count=100) <= _GROWTH * first

    def test_a_manager_keeps_its_books_with_it(self) -> None:
        for capacities in ((6, 12), (6, 8, 24), (8, 4, 2)):
            placement = self.make_placement(tiers=len(capacities))
            serve_traffic(Workbench(*capacities, placement=placement), requests=60, seed=7)


def _questions(count: int) -> Sequence[Question]:
    return make_questions(count, tiers=_TIERS, chunks=96, seed=8)


def _of_all_chunks(placement: Placement) -> Answers:
    targets = [tuple(placement.demotion_targets(source, _TIERS)) for source in range(_TIERS)]
    return [placement.places_used, placement.min_chunks, targets]


def _answers(placement: Placement, question: Question, ctx: PolicyContext) -> Answers:
    """Ask everything that may be asked about the chunks of ``question``, at once."""
    question.set_scene(ctx)
    copies, tier = question.copies, question.tier
    return [
        [tuple(places) for places in placement.place_many(copies, ctx)],
        list(placement.admit_many(copies, tier, Why.DEMOTE, ctx)),
        list(placement.promote_many(copies, tier, ctx)),
        list(placement.demote_many(copies, tier - 1, ctx)),
    ]


def _answers_one_by_one(
    placement: Placement, question: Question, ctx: PolicyContext
) -> Answers:
    question.set_scene(ctx)
    copies, tier = question.copies, question.tier
    return [
        [tuple(placement.place(copy, ctx)) for copy in copies],
        [placement.admit(copy, tier, Why.DEMOTE, ctx) for copy in copies],
        [placement.promote(copy, tier, ctx) for copy in copies],
        [placement.demote(copy, tier - 1, ctx) for copy in copies],
    ]
