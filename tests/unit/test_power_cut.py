"""The simulated disk itself: it forgets what was not synced, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.power_cut import PowerCutDisk

SECTOR = 512
ROOM = 4 * SECTOR


@pytest.fixture
def disk(tmp_path: Path) -> PowerCutDisk:
    disk = PowerCutDisk(tmp_path / "root", sector_nbytes=SECTOR)
    disk.make_directory(disk.root)
    return disk


def make_file(disk: PowerCutDisk, name: str = "file") -> int:
    fd = disk.open(disk.root / name, os.O_RDWR | os.O_CREAT)
    disk.allocate(fd, ROOM)
    return fd


def states(disk: PowerCutDisk) -> set[frozenset[tuple[str, bytes]]]:
    cut = disk.cut()
    found = {
        frozenset((str(path), content) for path, content in cut.files(pick).items())
        for pick in cut.every_pick()
    }
    assert cut.count >= len(found)
    return found


def contents(disk: PowerCutDisk) -> set[bytes]:
    return {content for state in states(disk) for _, content in state}


def test_each_sector_that_was_not_synced_is_new_or_old_by_itself(disk: PowerCutDisk) -> None:
    fd = make_file(disk)
    disk.settle()
    disk.pwritev(fd, [memoryview(b"a" * 2 * SECTOR)], SECTOR)
    old, new = bytes(SECTOR), b"a" * SECTOR
    assert contents(disk) == {
        old + first + second + old for first in (old, new) for second in (old, new)
    }
    disk.sync_data(fd)
    assert contents(disk) == {old + new + new + old}
    disk.close(fd)


def test_of_two_writes_to_one_sector_either_may_be_there(disk: PowerCutDisk) -> None:
    fd = make_file(disk)
    disk.settle()
    disk.pwritev(fd, [memoryview(b"aaaa")], 0)
    disk.pwritev(fd, [memoryview(b"bb")], 1)
    assert {content[:4] for content in contents(disk)} == {b"\0" * 4, b"aaaa", b"abba"}
    disk.close(fd)


def test_a_size_and_a_name_count_only_when_synced(disk: PowerCutDisk) -> None:
    disk.settle()
    fd = make_file(disk)
    assert states(disk) == {
        frozenset(),
        frozenset({("file", b"")}),
        frozenset({("file", bytes(ROOM))}),
    }
    disk.sync(fd)
    assert states(disk) == {frozenset(), frozenset({("file", bytes(ROOM))})}
    directory = disk.open(disk.root, os.O_RDONLY | os.O_DIRECTORY)
    disk.sync(directory)
    assert states(disk) == {frozenset({("file", bytes(ROOM))})}
    for each in (fd, directory):
        disk.close(each)


def test_names_change_in_order_and_a_rename_at_one_stroke(disk: PowerCutDisk) -> None:
    disk.close(make_file(disk, "a"))
    disk.close(make_file(disk, "b"))
    disk.settle()
    disk.rename(disk.root / "a", disk.root / "c")
    disk.unlink(disk.root / "b")
    names = {frozenset(name for name, _ in state) for state in states(disk)}
    assert names == {frozenset("ab"), frozenset("cb"), frozenset("c")}


def test_any_moment_of_the_past_can_be_looked_at(disk: PowerCutDisk, tmp_path: Path) -> None:
    fd = make_file(disk)
    disk.settle()
    before = disk.moment
    disk.pwritev(fd, [memoryview(b"a" * SECTOR)], 0)
    disk.close(fd)
    assert disk.cut(before).count == 1
    cut = disk.cut()
    cut.restore([1], tmp_path / "old")
    cut.restore([0], tmp_path / "new")
    assert (tmp_path / "old" / "file").read_bytes() == bytes(ROOM)
    assert (tmp_path / "new" / "file").read_bytes() == (disk.root / "file").read_bytes()
    with pytest.raises(ValueError, match="not among 2 states"):
        cut.files([2])


@pytest.mark.parametrize("level", ["NORMAL", "FULL"])
def test_a_commit_to_the_index_is_safe_only_when_it_waited(
    disk: PowerCutDisk, level: str
) -> None:
    disk.close(disk.open(disk.root / "index", os.O_RDWR | os.O_CREAT))
    connection = disk.connect(disk.root / "index")
    connection.execute("PRAGMA journal_mode=WAL").fetchall()
    connection.execute("CREATE TABLE t(x)")
    disk.settle()
    connection.execute(f"PRAGMA synchronous={level}")
    connection.execute("INSERT INTO t VALUES (1)")
    assert (disk.cut().count == 1) == (level == "FULL")
    connection.close()
    assert disk.cut().count == 1, "closing folds the log into the database"
