"""The message that says why what is there was computed."""

from __future__ import annotations

import logging

import pytest

from kvtier.connector.report.worth_log import WorthLog
from kvtier.manager import LoadWorth
from kvtier.types import Outcome, TransferResult


@pytest.fixture(autouse=True)
def informed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def skipped(worth: LoadWorth, chunks: int) -> None:
    worth.skip(worth.choose([1] * chunks, groups=1, now=0.0))


def slow_disk() -> LoadWorth:
    worth = LoadWorth(
        tiers=2, chunk_nbytes=1_000_000, chunk_tokens=100, recompute_s_per_token=1e-4
    )
    worth.sent(1, 1, 10)
    result = TransferResult(1, [Outcome.DONE] * 10, seconds=2.0)
    worth.returned(result, timeout_s=10.0, now=0.0)
    worth.sent(2, 1, 5)
    return worth


def test_the_latest_decision_is_explained_with_its_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log, worth = WorthLog(["ram", "nvme"]), slow_disk()
    log.note(worth, 0.0)
    assert not caplog.records
    skipped(worth, 10)
    log.note(worth, 1.0)
    (record,) = caplog.records
    assert "10 chunks were not loaded" in record.getMessage()
    assert (
        "loading 10.0 MB from nvme behind 5.0 MB would have taken 3 s, computing takes 0.1 s; "
        "1000 tokens are computed"
    ) in record.getMessage()


def test_later_ones_are_added_up_and_told_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log, worth = WorthLog(["ram", "nvme"]), slow_disk()
    for second in range(1, 62):
        skipped(worth, 2)
        log.note(worth, float(second))
        log.note(worth, float(second))
    assert [record.getMessage().split(":")[1].split()[0] for record in caplog.records] == [
        "2",
        "120",
    ]
