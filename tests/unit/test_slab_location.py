"""Files in use that are not where they were are told of once, and so is their return."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.tiers.slab.location import LocationCheck


class Seconds:
    """A clock that goes on by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def is_there() -> bool:
    """Say of a file that it is not removed."""
    return False


@pytest.fixture
def clock() -> Seconds:
    return Seconds()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    store.mkdir()
    for name in ("slots.bin", "index.sqlite"):
        (store / name).write_text(name)
    return store


@pytest.fixture
def look(
    store: Path, clock: Seconds, caplog: pytest.LogCaptureFixture
) -> Callable[[], list[str]]:
    """Return what is said of a look a second later."""
    location = LocationCheck(
        "nvme", [store / "slots.bin", store / "index.sqlite"], is_there, clock
    )

    def look() -> list[str]:
        caplog.clear()
        clock.now_s += 1.0
        location.check_if_due()
        assert {record.levelname for record in caplog.records} <= {"WARNING"}
        return [record.getMessage() for record in caplog.records]

    return look


def replace_directory(store: Path) -> None:
    store.rename(store.with_name("moved"))
    shutil.copytree(store.with_name("moved"), store)


def replace_index(store: Path) -> None:
    (store / "index.sqlite").rename(store.with_name("moved"))
    (store / "index.sqlite").touch()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(lambda at: at.rename(at.with_name("moved")), "slots.bin", id="moved"),
        pytest.param(replace_directory, "slots.bin", id="replaced"),
        pytest.param(replace_index, "index.sqlite", id="index"),
        pytest.param(lambda at: (at / "index.sqlite").unlink(), "index.sqlite", id="removed"),
    ],
)
def test_files_that_a_restart_would_miss_are_logged_once(
    store: Path, look: Callable[[], list[str]], change: Callable[[Path], object], named: str
) -> None:
    assert look() == []
    change(store)
    (warning,) = look()
    assert f"tier nvme: {store / named} no longer leads to the file in use" in warning
    assert look() == []


def test_a_file_that_is_put_back_is_logged_once_and_watched_again(
    store: Path, look: Callable[[], list[str]]
) -> None:
    moved = store.with_name("moved")
    store.rename(moved)
    assert len(look()) == 1
    moved.rename(store)
    assert look() == [f"tier nvme: {store / 'slots.bin'} leads to the file in use again"]
    assert look() == []
    store.rename(moved)
    assert len(look()) == 1


@pytest.fixture
def moved(store: Path, clock: Seconds) -> LocationCheck:
    """What was looked at once, and has moved since."""
    location = LocationCheck("nvme", [store / "slots.bin"], is_there, clock)
    location.check_if_due()
    store.rename(store.with_name("moved"))
    return location


def test_the_paths_are_looked_at_once_a_second(
    moved: LocationCheck, clock: Seconds, caplog: pytest.LogCaptureFixture
) -> None:
    clock.now_s = 0.9
    moved.check_if_due()
    assert caplog.records == []
    clock.now_s = 1.0
    moved.check_if_due()
    assert len(caplog.records) == 1


def test_the_last_look_is_not_put_off(
    moved: LocationCheck, caplog: pytest.LogCaptureFixture
) -> None:
    moved.check()
    assert len(caplog.records) == 1


def test_a_removed_file_is_an_error_but_a_warning_if_the_disk_fails(
    store: Path, clock: Seconds, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Callable[[], bool]] = [lambda: True, disk_error]
    for is_removed in answers:
        LocationCheck("nvme", [store / "slots.bin"], is_removed, clock).check_if_due()
    assert caplog.records == [], "nobody asks while it is where it was"
    watches = [
        LocationCheck("nvme", [store / "slots.bin"], is_removed, clock)
        for is_removed in answers
    ]
    shutil.rmtree(store)
    for location in watches:
        location.check_if_due()
    error, warning = caplog.records
    assert (error.levelname, warning.levelname) == ("ERROR", "WARNING")
    assert f"{store / 'slots.bin'} was removed while in use" in error.getMessage()


def disk_error() -> bool:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_relative_path_is_that_of_the_start(
    store: Path,
    clock: Seconds,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(store)
    location = LocationCheck("nvme", [Path("slots.bin")], is_there, clock)
    monkeypatch.chdir("/")
    location.check_if_due()
    assert caplog.records == []


def test_a_disk_that_does_not_say_says_nothing(
    store: Path, look: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(Path, "stat", fail)
        assert look() == []
    assert look() == []


def test_a_file_that_is_left_out_is_not_checked(
    store: Path, clock: Seconds, caplog: pytest.LogCaptureFixture
) -> None:
    location = LocationCheck(
        "nvme", [store / "slots.bin", store / "index.sqlite"], is_there, clock
    )
    location.leave_out(store / "index.sqlite")
    (store / "index.sqlite").unlink()
    location.check_if_due()
    assert caplog.records == []
    store.rename(store.with_name("moved"))
    clock.now_s = 1.0
    location.check_if_due()
    assert len(caplog.records) == 1


def test_files_that_were_not_there_from_the_start_are_not_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    LocationCheck("nvme", [tmp_path / "slots.bin"], is_there).check_if_due()
    assert caplog.records == []
