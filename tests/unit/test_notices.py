"""The notices to the operator: a tier that does not keep up, and loads that were skipped."""

from __future__ import annotations

import logging

import pytest

from kvtier.connector.notices import Notices
from kvtier.manager import CostModel
from kvtier.types import Outcome, TransferResult


@pytest.fixture
def log() -> Notices:
    return Notices(["ram", "nvme"], 512 << 10)


def test_the_first_drop_is_logged_at_once(
    log: Notices, caplog: pytest.LogCaptureFixture
) -> None:
    log.log_dropped([0, 0], 5.0)
    assert not caplog.records
    log.log_dropped([0, 3], 6.0)
    [record] = caplog.records
    assert "tier nvme does not keep up: 3 new chunks (1.50 MiB)" in record.getMessage()


def test_later_drops_are_added_up_and_logged_once_a_minute(
    log: Notices, caplog: pytest.LogCaptureFixture
) -> None:
    log.log_dropped([0, 3], 0.0)
    for second in range(1, 60):
        log.log_dropped([0, 3 + second], float(second))
    assert len(caplog.records) == 1
    log.log_dropped([0, 63], 60.0)
    assert "60 new chunks" in caplog.records[1].getMessage()
    log.log_dropped([0, 63], 120.0)
    assert len(caplog.records) == 2


def test_chunks_that_ram_refuses_have_a_line_of_their_own(
    log: Notices, caplog: pytest.LogCaptureFixture
) -> None:
    log.log_dropped([2, 3], 0.0)
    ram, nvme = (record.getMessage() for record in caplog.records)
    assert "tier ram is full of chunks that wait for a slower tier" in ram
    assert "2 new chunks (1.00 MiB) were not stored at all" in ram
    assert "tier nvme does not keep up" in nvme


@pytest.fixture(autouse=True)
def informed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def skipped(cost_model: CostModel, chunks: int) -> None:
    cost_model.record_skip(cost_model.choose([1] * chunks, counted=chunks, now=0.0))


def slow_disk() -> CostModel:
    cost_model = CostModel(
        tiers=2, chunk_nbytes=1_000_000, chunk_tokens=100, recompute_s_per_token=1e-4
    )
    cost_model.record_job(1, 1, 10)
    result = TransferResult(1, [Outcome.DONE] * 10, seconds=2.0)
    cost_model.record_result(result, timeout_s=10.0, now=0.0)
    cost_model.record_job(2, 1, 5)
    return cost_model


def test_the_latest_decision_is_explained_with_its_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log, cost_model = Notices(["ram", "nvme"], 4096), slow_disk()
    log.log_skipped(cost_model, 0.0)
    assert not caplog.records
    skipped(cost_model, 10)
    log.log_skipped(cost_model, 1.0)
    (record,) = caplog.records
    assert record.getMessage() == (
        "10 stored chunks were computed instead of loaded since the last such message. The "
        "latest, because computing is faster than loading: loading 10.0 MB from nvme behind "
        "5.0 MB would have taken 3 s and may take 8 s, computing takes 0.1 s; 1000 tokens are "
        "computed"
    )


def test_later_skips_are_added_up_and_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log, cost_model = Notices(["ram", "nvme"], 4096), slow_disk()
    for second in range(1, 62):
        skipped(cost_model, 2)
        log.log_skipped(cost_model, float(second))
        log.log_skipped(cost_model, float(second))
    assert [record.getMessage().split()[0] for record in caplog.records] == ["2", "120"]


def patient_engine() -> CostModel:
    """Return the gate of an engine that computes so slowly that every load pays."""
    return CostModel(
        tiers=2, chunk_nbytes=1_000_000, chunk_tokens=100, recompute_s_per_token=1.0
    )


def logged_reason(cost_model: CostModel, chunks: int, caplog: pytest.LogCaptureFixture) -> str:
    """Return the reason in the log for computing ``chunks`` chunks."""
    skipped(cost_model, chunks)
    Notices(["ram", "nvme"], 4096).log_skipped(cost_model, 0.0)
    return caplog.records[-1].getMessage().partition("because ")[2].partition(":")[0]


def test_each_cause_of_a_skipped_load_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert logged_reason(slow_disk(), 10, caplog) == "computing is faster than loading"
    cost_model = patient_engine()
    cost_model.record_job(1, 1, 10)
    cost_model.record_result(
        TransferResult(1, [Outcome.DONE] * 10, seconds=5.0), timeout_s=10.0, now=0.0
    )
    assert logged_reason(cost_model, 100, caplog) == "loading would not end in time"
    cost_model = patient_engine()
    cost_model.record_job(1, 1, 100)
    expired = TransferResult(1, [Outcome.EXPIRED] * 100, settled=False)
    cost_model.record_result(expired, timeout_s=10.0, now=0.0)
    assert (
        logged_reason(cost_model, 100, caplog)
        == "a load ran into its deadline and none has arrived since"
    )
