"""Every built-in placement and admission policy passes its contract, and serves a manager."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from kvtier.keys import ChunkKey
from kvtier.policies import (
    Admission,
    Placement,
    TieredPlacement,
    build_admission,
)
from kvtier.policies.admission import WriteBudget
from kvtier.policies.registry import ADMISSIONS
from kvtier.testing.admission_contract import AdmissionContract, BudgetContract
from kvtier.testing.placement_contract import PlacementContract
from tests.support.workbench import Workbench, prefix

PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "through": TieredPlacement,
    "at the second use": lambda tiers: TieredPlacement(tiers, write_after=2),
    "on evict": lambda tiers: TieredPlacement(tiers, write="evict"),
    "exclusive": lambda tiers: TieredPlacement(tiers, write="evict", promote="move"),
}


class TestLadders(PlacementContract):
    @pytest.fixture(params=sorted(PLACEMENTS), autouse=True)
    def name(self, request: pytest.FixtureRequest) -> None:
        self._name: str = request.param

    def make_placement(self, *, tiers: int) -> Placement:
        return PLACEMENTS[self._name](tiers)


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


class TestSmallWriteBudget(BudgetContract):
    keys_per_slot = 0
    chunks_per_day = 2

    def make_admission(self, *, capacity: int) -> Admission:
        return WriteBudget(bytes_per_day=2, chunk_nbytes=1)


@pytest.mark.parametrize("capacities", [(6, 12), (6, 8, 24), (8, 4, 2)])
@pytest.mark.parametrize("name", sorted(PLACEMENTS))
def test_a_manager_serves_with_each_placement(name: str, capacities: tuple[int, ...]) -> None:
    serve_traffic(Workbench(*capacities, placement=PLACEMENTS[name](len(capacities))))


@pytest.mark.parametrize("name", ["through", "on evict"])
@pytest.mark.parametrize("admission", sorted(ADMISSIONS.built_in))
def test_a_manager_serves_with_each_admission(admission: str, name: str) -> None:
    conditions = [build_admission(admission, capacity=30)]
    serve_traffic(Workbench(6, 8, 24, placement=PLACEMENTS[name](3), conditions=conditions))


def serve_traffic(bench: Workbench) -> None:
    """Serve 60 prompts of up to 4 chunks, some of them repeatedly, then demote what is due.

    The workbench checks the manager's invariants after every call.
    """
    rng = random.Random(7)
    for number in range(60):
        req_id = str(number)
        keys = prefix(rng.randrange(1, 5), of=int(12 * rng.random() ** 2))
        hits = hits_of(bench, keys, req_id)
        if hits:
            bench.load(keys[:hits], req_id)
        bench.store(keys[hits:], req_id)
        bench.manager.end_request(req_id)
        bench.settle(started=[req_id])
    bench.manager.flush()
    bench.settle()
    assert not bench.ram.dirty


def hits_of(bench: Workbench, keys: Sequence[ChunkKey], req_id: str) -> int:
    """Return how many of ``keys`` hit, once the manager has answered."""
    for _ in range(8):
        hits = bench.look(keys, req_id)
        if hits is not None:
            return hits
        bench.settle()
    pytest.fail(f"request {req_id} is still not answered")
