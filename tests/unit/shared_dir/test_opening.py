"""A shared directory is prepared, or refused with words that help."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, TierUnavailableError
from kvtier.types import Outcome
from tests.support.faulty_dir import FaultyDirIo
from tests.support.faulty_io import Fault
from tests.unit.shared_dir.conftest import FILE, Directory

MARKER = "kvtier-shared-dir.json"


async def test_the_directory_is_created_below_an_existing_parent(directory: Directory) -> None:
    await directory.harness()
    assert (directory.path / MARKER).exists()


async def test_a_missing_parent_is_refused(directory: Directory) -> None:
    directory.path = directory.path / "below"
    with pytest.raises(
        ConfigError, match="shared does not exist; mount the shared file system"
    ):
        await directory.prepare(directory.tier())


async def test_a_file_in_the_place_of_the_directory_is_refused(directory: Directory) -> None:
    directory.path.touch()
    with pytest.raises(ConfigError, match="give the tier another `path`"):
        await directory.prepare(directory.tier())


async def test_a_directory_that_cannot_be_written_is_refused(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A superuser may write everywhere, and tests may run as one.
    monkeypatch.setattr("kvtier.tiers.shared.dir_io.os.access", lambda *_: False)
    with pytest.raises(ConfigError, match="allow this process's user to create files there"):
        await directory.prepare(directory.tier())


async def test_a_capacity_below_one_chunk_is_refused(directory: Directory) -> None:
    with pytest.raises(ConfigError, match=f"below the {FILE} bytes of one chunk; raise"):
        directory.tier(capacity_bytes=FILE - 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 1}',
        '{"format": 2, "folders": 1}',
        '{"format": 1, "folders": 0}',
    ],
)
async def test_a_marker_of_another_version_is_refused(directory: Directory, text: str) -> None:
    directory.path.mkdir()
    (directory.path / MARKER).write_text(text)
    with pytest.raises(ConfigError, match="not of this version of kvtier"):
        await directory.prepare(directory.tier())
    assert (directory.path / MARKER).read_text() == text


async def test_a_directory_made_for_far_more_is_refused(directory: Directory) -> None:
    await directory.harness(capacity_bytes=1 << 30)
    with pytest.raises(
        ConfigError, match="for a larger capacity or smaller chunks; raise `capacity`"
    ):
        await directory.prepare(directory.tier())


async def test_engines_with_other_capacities_share_their_chunks(directory: Directory) -> None:
    first = await directory.harness(capacity_bytes=1 << 30)
    second = await directory.harness(capacity_bytes=1 << 40)
    keys = first.keys(range(50))
    await first.put(keys)
    assert await second.get(keys) == [0] * 50


async def test_a_full_directory_has_folders_of_some_hundred_files(directory: Directory) -> None:
    await directory.harness(capacity_bytes=1 << 30)
    folders = json.loads((directory.path / MARKER).read_text())["folders"]
    assert 256 <= (1 << 30) // FILE // folders <= 512


async def test_engines_that_start_together_agree_on_the_folders(
    directory: Directory, io: FaultyDirIo
) -> None:
    """The second engine makes its marker between the first one's look and its own marker."""
    directory.path.mkdir()
    first, second = directory.tier(io, capacity_bytes=1 << 30), directory.tier()
    inherited = io.link

    def link(source: Path, destination: Path) -> None:
        second.prepare()
        inherited(source, destination)

    io.link = link  # type: ignore[method-assign]
    await directory.prepare(first)
    assert json.loads((directory.path / MARKER).read_text())["folders"] == 1
    assert not directory.temporaries()
    await first.aclose()
    await second.aclose()


async def test_a_file_system_without_hard_links_works(
    directory: Directory, io: FaultyDirIo
) -> None:
    io.fail("link", errno.EOPNOTSUPP)
    harness = await directory.harness(io)
    keys = harness.keys(range(3))
    await harness.put(keys)
    assert await harness.get(keys) == [0] * 3
    assert not directory.temporaries()


@pytest.mark.parametrize("direct_io", ["auto", "off"])
async def test_a_file_system_without_direct_io_works(
    directory: Directory, io: FaultyDirIo, direct_io: str
) -> None:
    io.fail("open_direct", errno.EINVAL)
    harness = await directory.harness(io, direct_io=direct_io)
    keys = harness.keys(range(3))
    await harness.put(keys)
    assert await harness.get(keys) == [0] * 3


async def test_direct_io_that_is_required_and_missing_is_refused(
    directory: Directory, io: FaultyDirIo
) -> None:
    io.fail("open_direct", errno.EINVAL)
    with pytest.raises(ConfigError, match="set `direct_io: auto`"):
        await directory.prepare(directory.tier(io, direct_io="require"))


async def test_a_directory_that_everybody_may_write_is_warned_about(
    directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    directory.path.mkdir()
    directory.path.chmod(0o777)
    logging.getLogger("vllm.kvtier").addHandler(caplog.handler)
    await directory.harness()
    logging.getLogger("vllm.kvtier").removeHandler(caplog.handler)
    assert f"run: chmod o-w {directory.path}" in caplog.text


async def test_new_files_have_the_modes_of_the_umask(directory: Directory) -> None:
    harness = await directory.harness()
    await harness.put(harness.keys([1]))
    [file] = directory.values()
    directory.path.joinpath("plain").touch()
    assert file.stat().st_mode == directory.path.joinpath("plain").stat().st_mode


@pytest.mark.parametrize("call", ["make_directory", "status", "read_bytes"])
async def test_a_file_system_that_fails_now_is_used_when_it_works(
    directory: Directory, io: FaultyDirIo, call: str
) -> None:
    await directory.harness()
    io.strike(call, 0, Fault(errno.EIO, lasting=True))
    harness = await directory.harness(io)
    keys = harness.keys(range(3))
    with pytest.raises(TierUnavailableError, match=f"{directory.path}: .*error"):
        await harness.put(keys)
    io.heal()
    assert await harness.put(keys) == [Outcome.DONE] * 3
    assert await harness.get(keys) == [0] * 3


async def test_opening_waits_no_longer_than_allowed(
    directory: Directory, io: FaultyDirIo
) -> None:
    released = io.stall("make_directory")
    tier = directory.tier(io)
    await directory.prepare(tier, timeout_s=0.01)
    released.set()
    assert list(await tier.contains(["a"])) == [False]
    await tier.aclose()
