"""What is not ours is left alone: foreign files, symbolic links, other layouts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import CacheDamagedError, CacheLockedError, ConfigError
from kvtier.tiers.slab.inspect import find_namespaces, holder_of
from tests.unit.slab_namespace.opening import (
    SLOT,
    Opener,
    close,
    edit_layout,
    fill,
    fingerprint,
    slots_of,
)


def test_foreign_files_are_neither_counted_nor_removed(
    open_tier: Opener, root: Path, tmp_path: Path
) -> None:
    root.mkdir()
    look_alike = root / "0123456789abcdef"
    look_alike.mkdir()
    (look_alike / "slots.bin").write_bytes(bytes(20 * SLOT))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "slots.bin").write_bytes(b"precious")
    (root / fingerprint("linked").namespace()).symlink_to(elsewhere)
    (root / "notes.txt").write_text("mine")
    open_tier()
    assert (look_alike / "slots.bin").stat().st_size == 20 * SLOT
    assert (elsewhere / "slots.bin").read_bytes() == b"precious"
    assert (root / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "loop"])
def test_a_file_named_like_a_namespace_does_not_prevent_a_start(
    open_tier: Opener, root: Path, kind: str
) -> None:
    root.mkdir()
    look_alike = root / "0123456789abcdef"
    if kind == "file":
        look_alike.write_text("mine")
    else:
        look_alike.symlink_to(look_alike)
    fill(open_tier())
    assert look_alike.is_file() if kind == "file" else look_alike.is_symlink()


def test_a_stranger_in_a_namespace_survives_its_removal(open_tier: Opener, root: Path) -> None:
    close(open_tier(model="old"))
    stranger = root / fingerprint("old").namespace() / "thesis.tex"
    stranger.write_text("chapter 1")
    open_tier(model="new")
    assert stranger.read_text() == "chapter 1"
    assert not stranger.with_name("slots.bin").exists()


@pytest.mark.parametrize(
    "name", ["slots.bin", "index.sqlite", "index.sqlite-wal", "lock", "layout.json"]
)
def test_a_symbolic_link_in_place_of_a_file_is_refused(
    open_tier: Opener, own: Path, tmp_path: Path, name: str
) -> None:
    close(open_tier())
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (own / name).unlink(missing_ok=True)
    (own / name).symlink_to(target)
    with pytest.raises(CacheDamagedError, match=f"{name} is not a plain file; move it away"):
        open_tier()
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("above", [False, True], ids=["the path", "a directory above"])
def test_a_symbolic_link_at_the_path_or_above_is_followed(
    open_tier: Opener, root: Path, tmp_path: Path, above: bool, durability: str
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    root.symlink_to(disk)
    asked = root / "store" if above else root
    tier = open_tier(path=asked, durability=durability)
    fill(tier)
    close(tier)
    real = disk / "store" if above else disk
    assert (real / fingerprint("m").namespace() / "slots.bin").stat().st_size == 8 * SLOT
    assert root.is_symlink()
    for path in (asked, real):
        (space,) = find_namespaces(path)
        assert holder_of(space.directory) is None
        tier = open_tier(path=path, durability=durability)
        assert slots_of(tier) == list(range(8))
        with pytest.raises(CacheLockedError):  # by whichever name it is opened again
            open_tier(path=real if path == asked else asked)
        close(tier)


def test_a_symbolic_link_at_the_path_that_leads_nowhere_is_a_configuration_error(
    open_tier: Opener, root: Path, tmp_path: Path
) -> None:
    root.symlink_to(tmp_path / "unmounted")
    with pytest.raises(ConfigError, match=f"path {root} leads to {tmp_path}/unmounted, which"):
        open_tier()
    assert not (tmp_path / "unmounted").exists()


def test_a_symbolic_link_to_the_root_of_the_file_system_is_a_configuration_error(
    open_tier: Opener, root: Path
) -> None:
    root.symlink_to("/")
    with pytest.raises(ConfigError, match=f"{root} leads to the root of the file system; use"):
        open_tier()


def test_a_symbolic_link_in_place_of_the_namespace_is_refused(
    open_tier: Opener, own: Path, tmp_path: Path
) -> None:
    close(open_tier())
    moved = own.rename(tmp_path / "moved")
    own.symlink_to(moved)
    with pytest.raises(CacheDamagedError, match="not a directory of its own"):
        open_tier()


def test_a_foreign_file_named_like_ours_is_left_alone(open_tier: Opener, own: Path) -> None:
    own.mkdir(parents=True)
    (own / "slots.bin").write_bytes(b"precious")
    with pytest.raises(CacheDamagedError, match=r"it has slots\.bin but no layout\.json"):
        open_tier()
    assert (own / "slots.bin").read_bytes() == b"precious"
    assert [path.name for path in own.iterdir()] == ["slots.bin"]


def test_control_characters_in_the_name_of_a_foreign_file_are_escaped(
    open_tier: Opener, own: Path
) -> None:
    own.mkdir(parents=True)
    (own / "\x1b[2Jspoof\n").write_bytes(b"precious")
    with pytest.raises(CacheDamagedError) as caught:
        open_tier()
    assert r"it has \x1b[2Jspoof\n but no layout.json" in str(caught.value)


def test_other_slots_under_the_same_fingerprint_are_refused(open_tier: Opener) -> None:
    close(open_tier())
    with pytest.raises(CacheDamagedError, match="4096 bytes, this engine's 8192; move it away"):
        open_tier(slot_nbytes=8192)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"format": "tar"}, "does not describe a cache of kvtier"),
        ({"fingerprint": {"model": "m", "ranks": 2}}, "ranks is 2, this engine's 1"),
        ({"slot_nbytes": "many"}, "does not describe a cache of kvtier"),
    ],
)
def test_another_layout_in_our_place_is_refused(
    open_tier: Opener, own: Path, changes: dict[str, Any], message: str
) -> None:
    close(open_tier())
    edit_layout(own, **changes)
    with pytest.raises(CacheDamagedError, match=message):
        open_tier()


@pytest.mark.parametrize("text", [b"\xff\xfe", b"[" * 200_000], ids=["binary", "deep"])
def test_a_layout_that_is_not_json_is_refused(
    open_tier: Opener, own: Path, text: bytes
) -> None:
    close(open_tier())
    (own / "layout.json").write_bytes(text)
    with pytest.raises(CacheDamagedError, match=r"layout\.json"):
        open_tier()


def test_a_path_without_a_parent_is_a_configuration_error(
    open_tier: Opener, root: Path
) -> None:
    shutil.rmtree(root.parent)
    with pytest.raises(ConfigError, match="does not exist; create it, or mount the disk"):
        open_tier()


def test_a_path_that_is_a_file_is_a_configuration_error(open_tier: Opener, root: Path) -> None:
    root.write_text("")
    with pytest.raises(ConfigError, match="is not a directory"):
        open_tier()
