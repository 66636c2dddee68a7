"""The contract of placement policies, as a test class to inherit.

::

    class TestTiered(PlacementContract):
        def make_placement(self, *, tiers: int) -> TieredPlacement:
            return TieredPlacement(tiers)
"""

# ruff: noqa: D102 - the name of a test says what it shows
from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from typing_extensions import override

from kvtier.policies import Placement, PolicyContext, Promotion
from kvtier.testing.decision_contract import (
    GROWTH,
    TIERS,
    DecisionContract,
    Query,
    make_queries,
)
from kvtier.testing.probes import noting

__all__ = ["PlacementContract"]


class PlacementContract(DecisionContract[Placement, object]):
    """Tests that every placement policy must pass.

    Inherit as ``TestX`` and implement :meth:`make_placement`.

    Attributes:
        most_keys: Largest number of keys that the policy keeps.
    """

    most_keys: ClassVar[int] = 0

    @abstractmethod
    def make_placement(self, *, tiers: int) -> Placement:
        """Return a new policy for a cache of 1 to 4 tiers, RAM included."""

    @override
    def make_policy(self) -> Placement:
        return self.make_placement(tiers=TIERS)

    @override
    def answers(self, policy: Placement, query: Query, ctx: PolicyContext) -> list[object]:
        query.apply_to(ctx)
        copies, tier = query.copies, query.tier
        return [
            [tuple(places) for places in policy.place_many(copies, ctx)],
            list(policy.promote_many(copies, tier, ctx)),
            list(policy.demote_many(copies, tier - 1, ctx)),
        ]

    @override
    def answers_one_by_one(
        self, policy: Placement, query: Query, ctx: PolicyContext
    ) -> list[object]:
        query.apply_to(ctx)
        copies, tier = query.copies, query.tier
        return [
            [tuple(policy.place(copy, ctx)) for copy in copies],
            [policy.promote(copy, tier, ctx) for copy in copies],
            [policy.demote(copy, tier - 1, ctx) for copy in copies],
        ]

    def test_it_knows_the_number_of_tiers(self) -> None:
        for tiers in (1, 2, 3, 4):
            with noting(tiers=tiers):
                assert self.make_placement(tiers=tiers).tiers == tiers

    def test_places_are_slower_tiers_once_each(self) -> None:
        for tiers in (1, 2, 3, 4):
            with noting(tiers=tiers):
                placement, ctx = self.make_placement(tiers=tiers), PolicyContext()
                for query in make_queries(60):
                    query.apply_to(ctx)
                    for places in placement.place_many(query.copies, ctx):
                        assert set(places) <= set(range(1, tiers))
                        assert all(isinstance(tier, int) for tier in places)
                        assert len(set(places)) == len(places)

    def test_victims_are_demoted_to_declared_targets(self) -> None:
        for tiers in (1, 2, 3, 4):
            for source in range(tiers):
                with noting(tiers=tiers, source=source):
                    self._check_targets(tiers, source)

    def test_a_promotion_is_a_promotion(self) -> None:
        placement, ctx = self.make_policy(), PolicyContext()
        for query in make_queries(60):
            query.apply_to(ctx)
            ways = placement.promote_many(query.copies, query.tier, ctx)
            assert all(isinstance(way, Promotion) for way in ways)

    def test_what_holds_for_all_chunks_never_changes(self) -> None:
        placement, ctx = self.make_policy(), PolicyContext()
        before = _of_all_chunks(placement)
        assert isinstance(placement.places_used, bool)
        for query in make_queries(60):
            self.answers(placement, query, ctx)
            assert _of_all_chunks(placement) == before

    def test_its_memory_is_bounded_and_has_no_copy(self) -> None:
        placement, ctx = self.make_policy(), PolicyContext()
        chunks = 1000 + 3 * self.most_keys
        for query in make_queries(chunks, chunks=4 * chunks, seed=3):
            self.answers(placement, query, ctx)
        self.check_memory(placement, most_keys=self.most_keys)

    def test_the_work_per_chunk_does_not_grow(self) -> None:
        placement, ctx = self.make_policy(), PolicyContext()
        many = 200 + self.most_keys
        chunks = 100 * many

        def work(seed: int, count: int) -> float:
            asked = make_queries(count, chunks=chunks, seed=seed)
            return self.steps_per_chunk(placement, ctx, asked)

        first = work(seed=4, count=100)
        for query in make_queries(many, chunks=chunks, seed=5):
            self.answers(placement, query, ctx)
        assert work(seed=6, count=100) <= GROWTH * first

    def _check_targets(self, tiers: int, source: int) -> None:
        placement, ctx = self.make_placement(tiers=tiers), PolicyContext()
        targets = placement.demotion_targets(source)
        assert set(targets) <= set(range(source + 1, tiers))
        for query in make_queries(40):
            query.apply_to(ctx)
            answers = placement.demote_many(query.copies, source, ctx)
            assert {*answers} - {None} <= {*targets}
            assert all(isinstance(to, int | None) for to in (*answers, *targets))


def _of_all_chunks(placement: Placement) -> list[object]:
    targets = [tuple(placement.demotion_targets(source)) for source in range(TIERS)]
    return [placement.places_used, targets]
