"""Whatever the tiers' sizes, every token is the one vLLM generates alone."""

from __future__ import annotations

from tests.demo.runner import run_engine
from tests.demo.scenario import Report
from tests.integration.harness import Reference, Site

RAM_SHARE = 0.2


def hit_tokens(report: Report, tier: str) -> float:
    return report.count("kvtier_hit_tokens", tier=tier)


def assert_nothing_pinned(report: Report) -> None:
    """Once all requests ended and all demotions arrived, every chunk may be evicted."""
    last = report.waves[-1].counters
    held = {series: value for series, value in last.items() if "held_chunks" in series}
    assert len(held) == 2
    assert set(held.values()) == {0}
    assert last["kvtier_granted_chunks{}"] == 0
    assert last["kvtier_dirty_chunks{tier=ram}"] == 0


def test_two_hundred_requests_spill_to_nvme_and_every_token_is_equal(
    reference: Reference, site: Site
) -> None:
    blocks = reference.footprint_blocks
    waves = reference.conversations
    scenario = site.scenario(waves, ram_blocks=int(RAM_SHARE * blocks), nvme_blocks=blocks)
    report = run_engine(scenario, site.directory, "spill")
    assert len(report.answers()) == 200
    reference.assert_equal(report, waves=waves)
    assert hit_tokens(report, "ram") > 0
    assert hit_tokens(report, "nvme") > 0
    assert report.count("kvtier_failed_chunks") == 0
    assert report.count("kvtier_internal_errors") == 0
    assert_nothing_pinned(report)
    site.assert_nothing_held()


def test_tiers_too_small_for_the_work_and_chunks_of_four_blocks_keep_every_token_equal(
    reference: Reference, site: Site
) -> None:
    blocks = reference.footprint_blocks
    waves = reference.conversations
    scenario = site.scenario(
        waves,
        ram_blocks=int(RAM_SHARE * blocks),
        nvme_blocks=int(0.4 * blocks),
        blocks_per_chunk=4,
    )
    report = run_engine(scenario, site.directory, "small")
    reference.assert_equal(report, waves=waves)
    assert hit_tokens(report, "nvme") > 0
    assert report.count("kvtier_evicted_chunks", tier="nvme") > 0
    assert_nothing_pinned(report)
    site.assert_nothing_held()
