"""A route between two tiers that is out of service: which tier the figures name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.config import parse_config
from kvtier.connector import storage
from kvtier.connector.figures import collect_statistics
from kvtier.connector.service import CacheService
from kvtier.manager import GroupReach, Prompt
from kvtier.memory import RegionGeometry
from kvtier.transfer import ChannelStatistics
from kvtier.types import LayoutFingerprint
from tests.support.memory_tier import MemoryTier
from tests.support.workbench import Workbench
from tests.unit.regions import open_regions

SLOT_NBYTES = 4096
OUT_OF_SERVICE = ChannelStatistics(0, 0, 0.0, 0.0, 0, 0, 0, out_of_service=True)


@pytest.mark.parametrize(
    ("way", "skipped"),
    [((0, 1), [0, 1, 0]), ((2, 0), [0, 0, 1]), ((1, 2), [0, 0, 0])],
)
def test_the_figures_name_the_tier_that_ram_cannot_reach(
    way: tuple[int, int], skipped: list[int]
) -> None:
    snapshot = Workbench(4, 4, 4).manager.snapshot()
    source, destination = (snapshot.tiers[index].name for index in way)
    figures = collect_statistics(
        snapshot,
        {(source, destination): OUT_OF_SERVICE},
        tokens_per_chunk=16,
        pageable_ranks=0,
        gds_ranks=0,
        internal_errors=0,
        shadows=(),
        recorder=None,
        recovered={},
        stores=(),
    )
    assert [tier.out_of_service for tier in figures.tiers] == skipped


def test_a_tier_is_read_while_its_demotions_are_out_of_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "open_tier", MemoryTier.open)
    tiers = "".join(
        f"- {{kind: nvme, name: {name}, path: {tmp_path / name}, capacity: 16KiB}}\n"
        for name in ("fast", "large")
    )
    config = parse_config(
        f"tiers:\n- {{kind: ram, capacity: 16KiB}}\n{tiers}placement: {{write: evict}}\n",
        source="test",
    )
    geometry = RegionGeometry(4, SLOT_NBYTES, SLOT_NBYTES, 1, bounce_slots=2)
    with open_regions() as open_region:
        opened = storage.open_storage(
            config,
            open_region(geometry),
            LayoutFingerprint({}),
            tokens_per_chunk=16,
            groups=[GroupReach(16)],
            record_events=False,
        )
        try:
            service = CacheService(opened, tokens_per_chunk=16, close_timeout_s=1.0)
            calls: list[frozenset[int]] = []
            monkeypatch.setattr(opened.manager, "set_out_of_service", calls.append)
            for ways in ([("fast", "large")], [("fast", "large"), ("large", "ram")]):
                monkeypatch.setattr(opened.engine, "out_of_service", lambda ways=ways: ways)
                service.end_step(started=(), preempted=())
                service.lookup("nobody", Prompt([[b"no such chunk"]], 0, 16))
            assert calls == [frozenset({2})]
        finally:
            opened.close(timeout_s=5)
