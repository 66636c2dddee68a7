"""The warning about a tier that does not keep up."""

from __future__ import annotations

import pytest

from kvtier.connector.report.pressure import PressureLog


@pytest.fixture
def log() -> PressureLog:
    return PressureLog(["ram", "nvme"], 512 << 10)


def test_the_first_drop_is_told_at_once(
    log: PressureLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.note([0, 0], 5.0)
    assert not caplog.records
    log.note([0, 3], 6.0)
    [record] = caplog.records
    assert "tier nvme does not keep up: 3 new chunks (1.50 MiB)" in record.getMessage()


def test_later_drops_are_added_up_and_told_once_a_minute(
    log: PressureLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.note([0, 3], 0.0)
    for second in range(1, 60):
        log.note([0, 3 + second], float(second))
    assert len(caplog.records) == 1
    log.note([0, 63], 60.0)
    assert "60 new chunks" in caplog.records[1].getMessage()
    log.note([0, 63], 120.0)
    assert len(caplog.records) == 2


def test_what_ram_refuses_is_told_in_its_own_words_and_by_itself(
    log: PressureLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.note([2, 3], 0.0)
    ram, nvme = (record.getMessage() for record in caplog.records)
    assert "tier ram is full of chunks that wait for a slower tier" in ram
    assert "2 new chunks (1.00 MiB) were not stored at all" in ram
    assert "tier nvme does not keep up" in nvme
