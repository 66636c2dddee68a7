"""``kvtier doctor`` measures a shared tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.config import KvtierConfig, SharedTierConfig, parse_config
from kvtier.doctor import Status, examine
from kvtier.doctor.shared_rates import SharedRates, measure_shared_tier
from kvtier.errors import TierUnavailableError
from tests.support.memory_shared_tier import MemoryService


def make_config(section: str) -> KvtierConfig:
    text = f"tiers:\n- {{kind: ram, capacity: 16MiB}}\n- {{{section}}}\n"
    return parse_config(f"{text}transfer: {{piece: 64KiB}}\n", source="a.yaml")


def test_the_measured_times_of_a_shared_tier_are_reported(tmp_path: Path) -> None:
    config = make_config(f"kind: shared_dir, path: {tmp_path / 'shared'}, capacity: 64MiB")
    examination = examine(config, measure_s=0.05)
    rates = examination.rates["shared_dir"]
    assert isinstance(rates, SharedRates)
    assert rates.piece_bytes == 64 << 10
    assert 0 < rates.question_p50_s <= rates.question_p99_s
    assert min(rates.read_bytes_per_s, rates.write_bytes_per_s) > 0
    checks = {finding.check for finding in examination.findings}
    assert {
        f"shared_dir: {what}" for what in ("questions", "read rate", "write rate")
    } <= checks


def test_a_question_that_takes_longer_than_its_deadline_is_a_warning(tmp_path: Path) -> None:
    section = f"kind: shared_dir, path: {tmp_path / 'shared'}, capacity: 64MiB"
    config = make_config(f"{section}, lookup_timeout: 1us")
    (finding,) = [
        each
        for each in examine(config, measure_s=0.05).findings
        if each.check == "shared_dir: questions"
    ]
    assert finding.status is Status.WARNING
    assert finding.remedy.startswith("raise lookup_timeout")


def test_a_service_that_does_not_work_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "shared"
    config = make_config(f"kind: shared_dir, path: {path}, capacity: 64MiB")
    warnings = [
        each for each in examine(config, measure_s=0.05).findings if "shared_dir" in each.check
    ]
    assert warnings
    assert all(each.status in {Status.WARNING, Status.PROBLEM} for each in warnings)


def test_a_service_without_room_is_reported_as_full() -> None:
    MemoryService.named("full").is_full = True
    config = make_config(
        "kind: tests.support.memory_shared_tier:MemorySharedTier, service: full"
    )
    findings = examine(config, measure_s=0.05).findings
    (finding,) = [each for each in findings if each.check.endswith(": room")]
    assert finding.status is Status.WARNING
    assert "full" in finding.reason
    assert not any(each.check.endswith(": service") for each in findings)


def test_a_service_that_hangs_is_given_up() -> None:
    service = MemoryService.named("hanging")
    service.hang()
    section = "kind: tests.support.memory_shared_tier:MemorySharedTier, service: hanging"
    config = make_config(section)
    options = config.tiers[1]
    assert isinstance(options, SharedTierConfig)
    try:
        with pytest.raises(TierUnavailableError, match=r"no answer for 0\.2 s"):
            measure_shared_tier(config, options, seconds=0.01, stalled_s=0.2)
    finally:
        service.release()


def test_nothing_is_measured_without_a_time(tmp_path: Path) -> None:
    config = make_config(f"kind: shared_dir, path: {tmp_path / 'shared'}, capacity: 64MiB")
    assert examine(config).rates == {}
    assert not (tmp_path / "shared").exists()
