"""Estimates of load and compute times."""

from __future__ import annotations

import pytest

from kvtier.manager import CostModel
from kvtier.types import Outcome, TransferResult
from tests.unit.cost_models import CHUNK, TOKENS, cost_model, expire, kept, measure


def test_a_start_up_time_is_separated_from_a_rate() -> None:
    gate = cost_model()
    for job, chunks in enumerate((1, 4, 16, 64, 2, 32)):
        measure(gate, 1, chunks, 0.05 + chunks * 0.002, job=job)
    price = gate.figures().load_costs[1]
    assert price is not None
    assert price.start_s == pytest.approx(0.05)
    assert price.s_per_byte * CHUNK == pytest.approx(0.002)
    assert gate.figures().load_costs[2] is None


def test_loads_of_one_size_have_a_rate_and_no_start_up_time() -> None:
    gate = cost_model()
    for job in range(4):
        measure(gate, 1, 8, 0.08, job=job)
    price = gate.figures().load_costs[1]
    assert price is not None
    assert price.start_s == 0.0
    assert price.s_per_byte * CHUNK == pytest.approx(0.01)


def test_loads_that_all_take_the_same_time_have_no_rate() -> None:
    gate = cost_model()
    for job, chunks in enumerate((1, 4, 16, 64)):
        measure(gate, 1, chunks, 0.05 / (1 + chunks / 1000), job=job)
    price = gate.figures().load_costs[1]
    assert price is not None
    assert price.s_per_byte == 0.0
    assert price.start_s == pytest.approx(0.05, rel=0.1)


def test_bytes_queued_before_a_load_count_as_its_bytes() -> None:
    """Two jobs at once on a disk of one chunk a second: the second one waits for the first."""
    gate = cost_model()
    gate.record_job(1, 1, 4)
    gate.record_job(2, 1, 4)
    done = [Outcome.DONE] * 4
    gate.record_result(TransferResult(1, done, seconds=4.0), timeout_s=10.0, now=0.0)
    gate.record_result(
        TransferResult(2, done, queued_s=4.0, seconds=4.0), timeout_s=10.0, now=0.0
    )
    price = gate.figures().load_costs[1]
    assert price is not None
    assert price.seconds(CHUNK) == pytest.approx(1.0)


def test_a_tier_is_as_fast_as_it_was_lately() -> None:
    gate = cost_model()
    for job in range(20):
        measure(gate, 1, 8, 0.8, job=job, now=float(job))
    for job in range(20, 30):
        measure(gate, 1, 8, 0.008, job=job, now=float(job))
    price = gate.figures().load_costs[1]
    assert price is not None
    assert price.seconds(8 * CHUNK) < 0.1


@pytest.mark.parametrize(
    "outcome", [Outcome.FAILED, Outcome.CORRUPT, Outcome.CANCELLED, Outcome.REFUSED]
)
def test_a_load_that_failed_says_nothing_about_speed(outcome: Outcome) -> None:
    gate = cost_model()
    gate.record_job(1, 1, 2)
    gate.record_result(TransferResult(1, [outcome] * 2, seconds=9.0), timeout_s=10.0, now=0.0)
    assert gate.figures().load_costs[1] is None


def test_a_load_that_expired_took_its_deadline_at_least() -> None:
    gate = cost_model()
    gate.record_job(1, 1, 2)
    late = TransferResult(1, [Outcome.EXPIRED] * 2, settled=False)
    gate.record_result(late, timeout_s=10.0, now=0.0)
    gate.record_result(
        TransferResult(1, [Outcome.DONE] * 2, seconds=30.0), timeout_s=10.0, now=1.0
    )
    price = gate.figures().load_costs[1]
    assert price is not None
    assert price.seconds(2 * CHUNK) == pytest.approx(10.0)


def test_a_load_that_expired_while_more_was_expected_of_it_changes_nothing() -> None:
    gate = cost_model()
    measure(gate, 1, 4, 8.0, job=1)
    gate.record_job(2, 1, 6)
    expire(gate, 2, 6)
    price = gate.figures().load_costs[1]
    assert price is not None
    assert price.seconds(6 * CHUNK) == pytest.approx(12.0)


def test_a_load_that_expired_too_soon_for_the_estimate_raises_all_of_it() -> None:
    gate = cost_model()
    for job, chunks in enumerate((1, 4, 16, 64)):
        measure(gate, 1, chunks, 0.5 + chunks * 0.125, job=job)
    gate.record_job(9, 1, 16)
    expire(gate, 9, 16)
    price = gate.figures().load_costs[1]
    assert price is not None
    assert price.seconds(16 * CHUNK) == pytest.approx(10.0)
    assert price.start_s == pytest.approx(2.0)


def test_a_load_that_expired_in_the_queue_says_nothing_about_its_bytes() -> None:
    fresh, known = cost_model(), cost_model()
    measure(known, 1, 4, 0.1)
    for gate in (fresh, known):
        gate.record_job(2, 1, 64)
        expire(gate, 2, 64, ran=False)
    assert fresh.figures().load_costs[1] is None
    price = known.figures().load_costs[1]
    assert price is not None
    assert price.seconds(4 * CHUNK) == pytest.approx(0.1)


def test_a_tier_that_let_a_try_expire_is_not_tried_again_at_once() -> None:
    for ran in (True, False):
        gate = cost_model()
        measure(gate, 1, 16, 60.0)
        assert kept(gate, [1] * 16, now=120.0) == 16
        gate.record_job(2, 1, 16)
        expire(gate, 2, 16, ran=ran, now=130.0)
        assert kept(gate, [1] * 16, now=130.0) == 0


def test_computing_is_measured_by_steps_of_many_tokens() -> None:
    gate = cost_model(recompute_s=None)
    gate.record_prefill(1, 0.03, 0.0)
    assert gate.recompute_s_per_token is None
    for _ in range(100):
        gate.record_prefill(2048, 0.2, 0.0)
        gate.record_prefill(16, 0.1, 0.0)
    assert gate.recompute_s_per_token == pytest.approx(0.2 / 2048)
    for _ in range(100):
        gate.record_prefill(2048, 0.4, 0.0)
    assert gate.recompute_s_per_token == pytest.approx(0.4 / 2048, rel=0.02)


BIG_CHUNK = 2 << 20
BATCH = 256
TIMEOUT_S = 10.0


class SlowTier:
    """A tier that does one job after the other, each until its deadline, and what judges it.

    Args:
        s_per_byte: What it takes.
        recompute_s_per_byte: What computing takes instead.
    """

    def __init__(self, s_per_byte: float, recompute_s_per_byte: float) -> None:
        self._chunk_s = BIG_CHUNK * s_per_byte
        self.now = 0.0
        self._jobs = 0
        self.gate = CostModel(
            tiers=2,
            chunk_nbytes=BIG_CHUNK,
            chunk_tokens=TOKENS,
            recompute_s_per_token=recompute_s_per_byte * BIG_CHUNK / TOKENS,
        )

    def load(self, chunks: int) -> tuple[int, int, float]:
        """Load what is worth it; return the chunks kept, those that came and the wait."""
        wanted = kept(self.gate, [1] * chunks, now=self.now)
        jobs = [min(BATCH, wanted - at) for at in range(0, wanted, BATCH)]
        for job, size in enumerate(jobs, start=self._jobs):
            self.gate.record_job(job, 1, size)
        free_s, arrived = 0.0, 0
        for job, size in enumerate(jobs, start=self._jobs):
            began_s, free_s = free_s, free_s + size * self._chunk_s
            if free_s <= TIMEOUT_S:
                result = TransferResult(
                    job,
                    [Outcome.DONE] * size,
                    queued_s=began_s,
                    seconds=size * self._chunk_s,
                )
                self.gate.record_result(result, timeout_s=TIMEOUT_S, now=self.now + free_s)
                arrived += size
            else:
                ran = began_s < TIMEOUT_S
                expire(self.gate, job, size, ran=ran, now=self.now + TIMEOUT_S)
        self._jobs += len(jobs)
        waited_s = min(free_s, TIMEOUT_S)
        self.now += max(free_s, TIMEOUT_S)
        return wanted, arrived, waited_s

    def ns_per_byte(self) -> float:
        price = self.gate.figures().load_costs[1]
        assert price is not None
        return price.seconds(10**9)


def test_a_tier_slower_than_computing_is_found_out_although_most_jobs_expire() -> None:
    tier = SlowTier(10e-9, 6.1e-9)
    assert tier.load(2048) == (2048, 256, TIMEOUT_S)
    assert tier.ns_per_byte() == pytest.approx(10.0)
    for _ in range(6):
        wanted, arrived, waited_s = tier.load(2048)
        assert wanted == arrived <= 8, "it is tried at most"
        assert waited_s < 0.2
    assert tier.ns_per_byte() == pytest.approx(10.0)


def test_the_kept_part_of_a_long_prefix_on_a_slow_tier_arrives() -> None:
    tier = SlowTier(10e-9, 20e-9)
    tier.load(2048)
    for _ in range(6):
        wanted, arrived, waited_s = tier.load(2048)
        assert 256 < wanted == arrived
        assert waited_s < TIMEOUT_S
    assert tier.ns_per_byte() == pytest.approx(10.0)


@pytest.mark.parametrize("ns_per_byte", [20, 50, 100, 400])
def test_a_tier_that_never_finished_a_job_is_given_a_small_one_first(
    ns_per_byte: int,
) -> None:
    tier = SlowTier(ns_per_byte * 1e-9, 4 * ns_per_byte * 1e-9)
    assert tier.load(2048) == (2048, 0, TIMEOUT_S)
    assert tier.load(2048)[:2] == (8, 8)
    for _ in range(10):
        wanted, arrived, _ = tier.load(2048)
        assert wanted == arrived > 0
    assert tier.ns_per_byte() == pytest.approx(ns_per_byte, rel=0.01)
