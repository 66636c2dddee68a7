"""What a start finds again: after another capacity, a damaged index."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.testing.tier_harness import make_sources
from kvtier.types import Outcome, Purpose
from tests.unit.slab_namespace.opening import (
    KEYS,
    SLOT,
    Opener,
    close,
    damage,
    fill,
    slots_of,
)
from tests.unit.warned import warnings_in


def test_the_remains_of_an_interrupted_removal_are_used_again(
    open_tier: Opener, own: Path
) -> None:
    tier = open_tier()
    fill(tier)
    close(tier)
    (own / "slots.bin").unlink()
    assert slots_of(open_tier()) == []


def test_growing_keeps_what_is_there(open_tier: Opener, own: Path) -> None:
    tier = open_tier(slots=8)
    fill(tier)
    close(tier)
    tier = open_tier(slots=11)
    assert tier.capacity_slots == 11
    assert slots_of(tier) == list(range(8))
    assert (own / "slots.bin").stat().st_size == 11 * SLOT
    assert (own / "slots.bin").stat().st_blocks * 512 >= 11 * SLOT


def test_shrinking_drops_the_slots_beyond(open_tier: Opener, own: Path) -> None:
    tier = open_tier(slots=8)
    fill(tier)
    close(tier)
    tier = open_tier(slots=5)
    assert slots_of(tier) == list(range(5))
    assert (own / "slots.bin").stat().st_size == 5 * SLOT
    close(tier)
    assert slots_of(open_tier(slots=8)) == list(range(5))


@pytest.mark.parametrize("slots_left", [0, 3])
def test_a_start_warns_of_chunks_whose_slots_were_cut_off(
    open_tier: Opener, own: Path, caplog: pytest.LogCaptureFixture, slots_left: int
) -> None:
    tier = open_tier(slots=8)
    fill(tier)
    close(tier)
    os.truncate(own / "slots.bin", slots_left * SLOT + 100)
    tier = open_tier(slots=7)
    assert slots_of(tier) == list(range(slots_left))
    [warning] = warnings_in(caplog)
    assert f"{7 - slots_left} chunks are lost: {own / 'slots.bin'} was removed or" in warning
    close(tier)
    caplog.clear()
    assert slots_of(open_tier(slots=7)) == list(range(slots_left))
    assert warnings_in(caplog) == []


def test_chunks_that_a_lower_capacity_has_no_room_for_are_not_said_to_be_lost(
    open_tier: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(slots=8)
    fill(tier)
    close(tier)
    assert slots_of(open_tier(slots=5)) == list(range(5))
    assert warnings_in(caplog) == []


def test_a_capacity_below_one_slot_is_a_configuration_error(open_tier: Opener) -> None:
    with pytest.raises(ConfigError, match=r"capacity of 4\.00 KiB is less than one slot"):
        open_tier(slots=1, slot_nbytes=8192)


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00garbage" * 4096)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 100)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(garbage, id="garbage"),
        pytest.param(cut_short, id="cut-short"),
        pytest.param(damage("PRAGMA user_version=99"), id="newer-version"),
        pytest.param(damage("PRAGMA application_id=1"), id="another-application"),
        pytest.param(damage("ALTER TABLE chunks ADD COLUMN x"), id="more-columns"),
        pytest.param(damage("DROP TABLE meta"), id="fewer-tables"),
        pytest.param(damage(f"UPDATE chunks SET last_use={2**63 - 1}"), id="runaway-clock"),
    ],
)
def test_a_damaged_index_costs_the_cache_and_not_the_start(
    open_tier: Opener,
    own: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], None],
) -> None:
    tier = open_tier()
    fill(tier)
    close(tier)
    for _ in range(2):
        spoil(own / "index.sqlite")
        caplog.clear()
        tier = open_tier()
        assert slots_of(tier) == []
        [warning] = warnings_in(caplog)
        assert "index.sqlite.damaged" in warning
        fill(tier)
        close(tier)
        assert [path.name for path in own.glob("*damaged*")] == ["index.sqlite.damaged"]
    assert slots_of(open_tier()) == list(range(8))


def test_values_of_another_type_are_no_chunk(open_tier: Opener, own: Path) -> None:
    tier = open_tier()
    fill(tier)
    close(tier)
    damage("UPDATE chunks SET checksum='x' WHERE slot=3")(own / "index.sqlite")
    tier = open_tier()
    sources = make_sources(KEYS, SLOT)
    result = asyncio.run(tier.read(KEYS, range(8), sources, purpose=Purpose.LOAD))
    expected = [Outcome.CORRUPT if slot == 3 else Outcome.DONE for slot in range(8)]
    assert list(result.outcomes) == expected
