"""Every built-in placement and admission policy keeps its contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.policies import (
    Admission,
    ConditionalPlacement,
    LadderPlacement,
    Placement,
    build_admission,
)
from kvtier.policies.admission import SecondTouch, WriteBudget
from kvtier.policies.registry import ADMISSIONS
from kvtier.testing.admission_contract import AdmissionContract, BudgetContract
from kvtier.testing.placement_contract import PlacementContract

LADDERS: dict[str, Callable[[int], Placement]] = {
    "through": LadderPlacement,
    "at the second use": lambda tiers: LadderPlacement(tiers, write_after=2),
    "on evict": lambda tiers: LadderPlacement(tiers, write="evict"),
    "exclusive": lambda tiers: LadderPlacement(tiers, write="evict", promote="move"),
    "to stay at the second hit": lambda tiers: LadderPlacement(
        tiers, write="evict", promote_after=2
    ),
    "no short prompts": lambda tiers: LadderPlacement(tiers, min_chunks=3),
}


class TestLadders(PlacementContract):
    @pytest.fixture(params=sorted(LADDERS), autouse=True)
    def name(self, request: pytest.FixtureRequest) -> None:
        self._name: str = request.param

    def make_placement(self, *, tiers: int) -> Placement:
        return LADDERS[self._name](tiers)


class TestWithConditions(PlacementContract):
    most_keys = 2 * 64

    def make_placement(self, *, tiers: int) -> Placement:
        budget = WriteBudget(bytes_per_day=1000, chunk_nbytes=1)
        return ConditionalPlacement(LadderPlacement(tiers), [SecondTouch(64), budget])


class TestBuiltIn(AdmissionContract):
    @pytest.fixture(params=sorted(ADMISSIONS.built_in), autouse=True)
    def name(self, request: pytest.FixtureRequest) -> None:
        self._name: str = request.param

    def make_admission(self, *, capacity: int) -> Admission:
        return build_admission(self._name, capacity=capacity)


class TestWriteBudget(BudgetContract):
    keys_per_slot = 0
    chunks_per_day = 50

    def make_admission(self, *, capacity: int) -> Admission:
        return WriteBudget(bytes_per_day=50, chunk_nbytes=1)


class TestSmallWriteBudget(TestWriteBudget):
    chunks_per_day = 2

    def make_admission(self, *, capacity: int) -> Admission:
        return WriteBudget(bytes_per_day=2, chunk_nbytes=1)
