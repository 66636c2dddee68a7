"""What another user owns, or can replace, is neither served nor written to, nor by root."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtier.config import KvtierConfig, parse_config
from kvtier.doctor import Finding, Status, examine
from kvtier.errors import CacheDamagedError, ConfigError
from kvtier.tiers.slab.inspect import find_namespaces
from kvtier.tiers.slab.maintain import hold
from tests.unit.other_user import OTHER_UID, give_away
from tests.unit.slab_namespace.opening import SLOT, Opener, close, fill, fingerprint, slots_of


def config_of(path: Path) -> KvtierConfig:
    tiers = f"[{{kind: ram, capacity: 1MiB}}, {{kind: nvme, path: {path}, capacity: 2MiB}}]"
    return parse_config(f"tiers: {tiers}\n", source="a.yaml")


def problems_of(path: Path) -> list[Finding]:
    """Return the examination's problems of a path."""
    return [
        finding
        for finding in examine(config_of(path)).findings
        if finding.status is Status.PROBLEM and finding.key == "tiers[1].path"
    ]


@pytest.mark.parametrize("above", [0, 1], ids=["the path", "its parent"])
@pytest.mark.parametrize("foreign", [True, False], ids=["another user's", "open to others"])
def test_a_path_that_another_user_can_fill_is_refused_in_one_line(
    open_tier: Opener, tmp_path: Path, above: int, foreign: bool
) -> None:
    root = tmp_path / "disk" / "store"
    root.mkdir(parents=True, mode=0o700)
    fill(open_tier(path=root))
    place = [root, root.parent][above]
    if foreign:
        give_away(place)
        words = f"{place} belongs to user {OTHER_UID}"
    else:
        place.chmod(0o777)
        words = f"{place} has mode 0777"
    with pytest.raises(ConfigError, match=f"tier nvme: {words}") as refused:
        open_tier(path=root, model="another")
    assert "\n" not in str(refused.value)
    (problem,) = problems_of(root)
    assert problem.place.startswith("a.yaml:1: tiers[1].path = ")
    assert problem.reason.startswith(words)


@pytest.mark.parametrize("name", ["", "slots.bin", "index.sqlite", "layout.json", "lock"])
def test_a_namespace_or_a_file_of_another_user_is_not_served(
    open_tier: Opener, root: Path, own: Path, name: str
) -> None:
    tier = open_tier()
    fill(tier)
    close(tier)
    give_away(own / name)
    words = f"{own / name} belongs to user {OTHER_UID}"
    with pytest.raises(CacheDamagedError, match=f"{words}, and .*; move it away or remove it"):
        open_tier()
    (problem,) = problems_of(root)
    assert words in problem.reason


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("name", ["", "slots.bin", "index.sqlite", "layout.json", "lock"])
def test_a_namespace_or_a_file_that_others_can_write_to_is_not_served(
    open_tier: Opener, root: Path, own: Path, name: str, mode: int
) -> None:
    tier = open_tier()
    fill(tier)
    close(tier)
    path = own / name
    path.chmod(path.stat().st_mode | mode)
    words = rf"{path} has mode 0[67]\d\d: other users can write to it"
    with pytest.raises(CacheDamagedError, match=f"{words} .*; move it away or remove it"):
        open_tier()
    assert path.stat().st_mode & mode
    (problem,) = problems_of(root)
    assert re.search(words, problem.reason)
    (space,) = find_namespaces(root)
    with pytest.raises(ConfigError, match=words), hold(space, "stop it"):
        pytest.fail("it was locked")
    path.chmod(path.stat().st_mode & ~0o022)
    assert slots_of(open_tier()) == list(range(8))


def test_a_cache_with_a_strangers_file_is_neither_removed_nor_changed(
    open_tier: Opener, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = open_tier(model="old")
    fill(old)
    close(old)
    directory = root / fingerprint("old").namespace()
    give_away(directory / "slots.bin")
    (space,) = find_namespaces(root)
    with (
        pytest.raises(ConfigError, match=f"slots.bin belongs to user {OTHER_UID}, .*run this"),
        hold(space, "stop it"),
    ):
        pytest.fail("it was locked")
    open_tier(model="new")
    assert (directory / "slots.bin").stat().st_size == 8 * SLOT
    assert f"slots.bin belongs to user {OTHER_UID}" in caplog.text
