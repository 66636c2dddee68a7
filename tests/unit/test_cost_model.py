"""Which loads are worth their time."""

from __future__ import annotations

import pytest

from kvtier.manager import SkipCause
from kvtier.types import Outcome, TransferResult
from tests.unit.cost_models import (
    CHUNK,
    CHUNK_S,
    TOKENS,
    choice_of,
    cost_model,
    expire,
    kept,
    measure,
)


def test_chunks_are_loaded_before_anything_was_measured() -> None:
    assert kept(cost_model(), [1] * 8) == 8
    unpaced = cost_model(recompute_s=None)
    measure(unpaced, 1, 8, 1000.0)
    assert kept(unpaced, [1] * 8) == 8


def test_a_load_that_is_faster_than_computing_is_done_and_a_slower_one_is_not() -> None:
    fast, slow = cost_model(), cost_model()
    measure(fast, 1, 8, 8 * CHUNK_S * 0.9)
    measure(slow, 1, 8, 8 * CHUNK_S * 1.1)
    assert kept(fast, [1] * 8) == 8
    assert kept(slow, [1] * 8) == 0


def test_a_queue_makes_a_load_not_worth_it() -> None:
    gate = cost_model()
    measure(gate, 1, 8, 8 * CHUNK_S * 0.5)
    assert kept(gate, [1] * 8) == 8
    gate.record_job(7, 1, 7)
    assert kept(gate, [1] * 8) == 8
    gate.record_job(8, 1, 2)
    choice = choice_of(gate, [1] * 8)
    assert choice.kept == 0
    assert choice.queued_nbytes == 9 * CHUNK
    assert choice.load_s == pytest.approx(17 * CHUNK_S * 0.5)
    assert choice.recompute_s == pytest.approx(8 * CHUNK_S)


@pytest.mark.parametrize(
    ("busy", "worth_times"), [(0.0, 1.0), (0.25, 1.33), (0.5, 2.0), (0.75, 4.0), (1.0, 10.0)]
)
def test_an_engine_that_is_busy_makes_slower_loads_worth_it(
    busy: float, worth_times: float
) -> None:
    gate = cost_model()
    for second in range(600):
        gate.record_prefill(1000, busy, float(second))
    measure(gate, 1, 8, 8 * CHUNK_S * worth_times * 0.97, now=599.0)
    assert kept(gate, [1] * 8, now=599.0) == 8
    measure(gate, 2, 8, 8 * CHUNK_S * worth_times * 1.04, now=599.0)
    assert kept(gate, [2] * 8, now=599.0) == 0
    measure(gate, 1, 8, 8 * CHUNK_S * 2, now=2000.0)
    assert kept(gate, [1] * 8, now=2000.0) == 0, "it has been idle for long"


def test_a_long_prefix_is_worth_a_start_up_time_that_a_short_one_is_not() -> None:
    gate = cost_model()
    for job, chunks in enumerate((1, 4, 16, 64)):
        measure(gate, 1, chunks, CHUNK_S * (8 + chunks * 0.5), job=job)
    assert kept(gate, [1] * 8) == 0
    assert kept(gate, [1] * 24) == 24


def test_the_head_is_loaded_and_the_tail_computed_where_the_tail_is_in_a_slow_tier() -> None:
    gate = cost_model()
    measure(gate, 1, 8, 8 * CHUNK_S * 0.1, job=1)
    measure(gate, 2, 8, 8 * CHUNK_S * 10, job=2)
    choice = choice_of(gate, [1, 1, 1, 1, 2, 2, 1, 1])
    assert choice.kept == 4
    assert choice.skipped == {1: 2, 2: 2}
    assert choice.tokens == 4 * TOKENS


def test_a_slow_chunk_is_loaded_for_the_sake_of_those_in_ram_behind_it() -> None:
    gate = cost_model()
    measure(gate, 2, 1, 3 * CHUNK_S)
    assert kept(gate, [2, 0, 0]) == 0
    assert kept(gate, [2, 0, 0, 0]) == 4


def test_chunks_in_ram_before_the_first_slow_one_are_always_loaded() -> None:
    gate = cost_model()
    measure(gate, 1, 1, 100.0)
    assert kept(gate, [0, 0, 0, 1, 1, 0]) == 3


def test_a_window_beside_the_prefix_saves_no_tokens_and_costs_its_bytes() -> None:
    gate = cost_model()
    measure(gate, 1, 8, 8 * CHUNK_S * 0.8)
    assert gate.choose([1] * 14, counted=12, now=0.0) is None
    choice = gate.choose([1] * 24, counted=12, now=0.0)
    assert choice is not None
    assert choice.kept == 0
    assert choice.tokens == 12 * TOKENS
    gate.record_skip(choice)
    assert gate.figures().skipped_tokens[1] == 12 * TOKENS


def test_of_several_groups_all_is_loaded_or_nothing() -> None:
    gate = cost_model()
    measure(gate, 1, 8, 8 * CHUNK_S * 0.1, job=1)
    measure(gate, 2, 8, 8 * CHUNK_S * 10, job=2)
    assert kept(gate, [1, 1, 1, 1, 1, 2], groups=2) == 0
    assert kept(gate, [1, 1, 1, 1, 1, 1], groups=2) == 6


def test_skipped_chunks_are_counted_by_tier() -> None:
    gate = cost_model()
    measure(gate, 1, 1, 100.0)
    choice = choice_of(gate, [0, 1, 1])
    gate.record_skip(choice)
    gate.record_skip(None)
    figures = gate.figures()
    assert figures.skipped_chunks == (0, 2, 0)
    assert figures.skipped_tokens == (0, 2 * TOKENS, 0)
    assert figures.last == choice


def test_a_slow_tier_is_tried_again_with_little_and_one_load_at_a_time() -> None:
    gate = cost_model()
    measure(gate, 1, 64, 64 * CHUNK_S * 4)
    assert kept(gate, [1] * 64, now=19.0) == 0
    assert kept(gate, [1] * 64, now=21.0) == 16
    gate.record_job(9, 1, 16)
    assert kept(gate, [1] * 64, now=21.0) == 0
    result = TransferResult(9, [Outcome.DONE] * 16, seconds=16 * CHUNK_S * 0.1)
    gate.record_result(result, timeout_s=10.0, now=22.0)
    gate.record_job(10, 1, 16)
    result = TransferResult(10, [Outcome.DONE] * 16, seconds=16 * CHUNK_S * 0.1)
    gate.record_result(result, timeout_s=10.0, now=22.0)
    for job in range(11, 20):
        measure(gate, 1, 16, 16 * CHUNK_S * 0.1, now=23.0, job=job)
    assert kept(gate, [1] * 64, now=23.0) == 64


def test_chunks_that_did_not_arrive_do_not_make_a_tier_look_fast() -> None:
    costs = []
    for outcomes in ([Outcome.DONE] * 2, [Outcome.DONE] * 2 + [Outcome.MISSING] * 14):
        gate = cost_model()
        gate.record_job(1, 1, len(outcomes))
        gate.record_result(TransferResult(1, outcomes, seconds=0.5), timeout_s=10.0, now=0.0)
        costs.append(gate.figures().load_costs[1])
    assert costs[0] == costs[1]


def test_a_tier_is_tried_again_behind_one_that_is_fast() -> None:
    gate = cost_model()
    measure(gate, 2, 64, 64 * CHUNK_S * 4, job=1)
    measure(gate, 1, 64, 64 * CHUNK_S * 0.1, job=2, now=60.0)
    assert kept(gate, [1] * 64 + [2] * 64, now=60.0) == 64 + 16


def test_a_tier_known_by_its_deadline_only_is_tried_by_one_request_at_a_time() -> None:
    gate = cost_model(recompute_s=1.0)
    gate.record_job(1, 1, 64)
    expire(gate, 1, 64)
    assert kept(gate, [0] * 4 + [1] * 32) == 4 + 16
    gate.record_job(2, 1, 16)
    assert kept(gate, [0] * 4 + [1] * 32) == 4
    gate.record_result(
        TransferResult(2, [Outcome.DONE] * 16, seconds=1.0), timeout_s=10.0, now=0.0
    )
    assert kept(gate, [0] * 4 + [1] * 32) == 4 + 32


def test_no_more_is_loaded_than_arrives_in_time() -> None:
    gate = cost_model(recompute_s=1.0)
    measure(gate, 1, 10, 1.0)
    assert kept(gate, [1] * 100) == 80
    assert choice_of(gate, [1] * 100).cause is SkipCause.LATE
    gate.record_job(2, 1, 50)
    assert kept(gate, [1] * 100) == 30
    gate.record_job(3, 1, 30)
    assert kept(gate, [1] * 100) == 0


@pytest.mark.parametrize("chunks", [8, 16, 2000])
def test_a_try_is_no_larger_for_several_groups(chunks: int) -> None:
    gate = cost_model()
    measure(gate, 1, 64, 64 * CHUNK_S * 4)
    assert kept(gate, [1] * chunks, groups=2) == 0
    assert kept(gate, [1] * chunks, groups=2, now=100.0) == min(chunks, 16)


def test_a_load_that_would_not_be_done_in_time_is_cut_to_what_is() -> None:
    gate = cost_model(recompute_s=1.0)
    measure(gate, 1, 8, 0.8)
    assert kept(gate, [1] * 100) == 80
    assert kept(gate, [1] * 100, groups=2) == 0
    assert kept(gate, [1] * 80, groups=2) == 80
    gate.record_job(2, 1, 30)
    assert kept(gate, [1] * 100) == 50
    assert kept(gate, [2] * 40 + [1] * 100) == 90, "each tier has the time to itself"
