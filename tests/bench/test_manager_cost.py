"""What the manager costs the scheduler's thread, per chunk; run with ``nox -s bench``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.keys import make_key
from kvtier.manager import ManagerLimits, TieredOffloadingManager, TierState
from kvtier.policies import LadderPlacement, build_eviction
from kvtier.testing.fakes import RecordingTruth
from kvtier.types import Outcome, TransferResult

CHUNKS, PER_REQUEST = 100_000, 64
CAPACITY = CHUNKS // 2


def make_manager() -> TieredOffloadingManager:
    tier = TierState("ram", 0, CAPACITY, build_eviction("lru", capacity=CAPACITY))
    return TieredOffloadingManager(
        [tier],
        placement=LadderPlacement(tiers=1, write="through"),
        limits=ManagerLimits(pin_budget=CAPACITY // 2, reserve=0.0, queue=1024),
        truth=RecordingTruth(),
    )


def requests() -> list[list[bytes]]:
    return [
        [make_key(number.to_bytes(32, "big"), 0) for number in range(at, at + PER_REQUEST)]
        for at in range(0, CHUNKS - PER_REQUEST, PER_REQUEST)
    ]


def store_all(manager: TieredOffloadingManager, prompts: list[list[bytes]]) -> None:
    for number, keys in enumerate(prompts):
        req_id = str(number)
        manager.begin_request(req_id)
        manager.lookup_prefix(keys, req_id)
        plan = manager.prepare_store(keys, req_id)
        manager.end_step(started=[req_id])
        if plan is not None:
            manager.complete_store(set(plan.keys))
        for job in manager.take_jobs():
            manager.apply(TransferResult(job.job_id, [Outcome.DONE] * len(job.keys)))
        manager.end_request(req_id)


def load_all(manager: TieredOffloadingManager, prompts: list[list[bytes]]) -> int:
    loaded = 0
    for number, keys in enumerate(prompts):
        req_id = f"load-{number}"
        hits = manager.lookup_prefix(keys, req_id)
        if hits:
            manager.prepare_load(keys[:hits], req_id)
            manager.end_step(started=[req_id])
            manager.complete_load(set(keys[:hits]))
            loaded += hits
        manager.end_request(req_id)
    return loaded


@pytest.mark.parametrize("phase", ["store", "load"])
def test_manager_cost(benchmark: Callable[..., object], phase: str) -> None:
    prompts = requests()

    def prepared() -> tuple[tuple[TieredOffloadingManager, list[list[bytes]]], dict[str, int]]:
        manager = make_manager()
        if phase == "load":
            store_all(manager, prompts)
            # The second half of the prompts is what is resident now.
            return (manager, prompts[len(prompts) // 2 + 1 :]), {}
        return (manager, prompts), {}

    run = store_all if phase == "store" else load_all
    benchmark.pedantic(run, setup=prepared, rounds=5)  # type: ignore[attr-defined]
