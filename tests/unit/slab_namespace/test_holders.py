"""Who may open a store: modes, locks, and processes that hold it or held it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtier.errors import CacheDamagedError, CacheLockedError, ConfigError
from kvtier.os.block_io import BlockIo
from kvtier.tiers.slab import tier as slab
from kvtier.tiers.slab.inspect import find_namespaces, holder_of
from kvtier.tiers.slab.lock import Patience
from kvtier.tiers.slab.maintain import hold
from kvtier.tiers.slab.namespace import open_root
from tests.unit.slab_namespace.opening import Opener, close, fill


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_only_the_owner_gets_in_whatever_the_umask(
    open_tier: Opener, root: Path, umask: int
) -> None:
    former = os.umask(umask)
    try:
        fill(open_tier())
    finally:
        os.umask(former)
    for path in [root, *root.rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_no_file_is_left_open_to_a_child(open_tier: Opener, root: Path) -> None:
    open_tier()
    ours = [
        int(link.name)
        for link in Path("/proc/self/fd").iterdir()
        if os.path.realpath(link).startswith(str(root))
    ]
    assert len(ours) >= 3
    assert not any(os.get_inheritable(fd) for fd in ours)


def test_the_error_of_a_second_opener_in_this_process_names_the_holder(
    open_tier: Opener,
) -> None:
    tier = open_tier()
    with pytest.raises(CacheLockedError, match=f"pid {os.getpid()} on host ") as caught:
        open_tier()
    assert caught.value.holder.startswith(f"pid {os.getpid()} ")
    close(tier)
    open_tier()


@pytest.mark.parametrize("name", ["lock", "slots.bin", "index.sqlite", "layout.json"])
def test_a_deleted_file_lets_no_second_engine_and_no_tool_in(
    open_tier: Opener, own: Path, name: str
) -> None:
    fill(open_tier())
    (space,) = find_namespaces(own.parent)
    (own / name).unlink()
    with pytest.raises(CacheLockedError if name != "layout.json" else CacheDamagedError):
        open_tier()
    with pytest.raises(ConfigError, match=r"is in use by .*; stop it"), hold(space, "stop it"):
        pytest.fail("it was not locked")
    assert holder_of(own) is not None


def test_two_engines_cannot_open_one_store_at_once_whatever_is_deleted(
    open_tier: Opener, root: Path
) -> None:
    close(open_tier())
    for path in root.glob("*lock*"):
        path.unlink()
    with open_root("nvme", root, BlockIo()):
        assert not list(root.glob("*lock*")), "there is nothing to delete"
        with (
            pytest.raises(CacheLockedError),
            open_root("nvme", root, BlockIo(), Patience(timeout_s=0)),
        ):
            pytest.fail("it was not locked")


HOLDER = """
import pathlib, sys
from kvtier.config import NvmeTierConfig
from kvtier.os.iopool import IoPool
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.types import LayoutFingerprint
options = NvmeTierConfig(path=pathlib.Path(sys.argv[1]), capacity_bytes=8 * 4096)
pool = IoPool(1, name="kvtier-holder")
context = TierContext(4096, LayoutFingerprint({"model": "m", "ranks": 1}), pool)
tier = SlabTier.open(options, context)
sys.stdout.write("open\\n")
sys.stdout.flush()
sys.stdin.read()
"""
PARENT = (
    HOLDER[: HOLDER.index("sys.stdout")]
    + """
import os, signal
if os.fork():
    os.kill(os.getpid(), signal.SIGKILL)
os.read(int(sys.argv[2]), 1)
os._exit(0)
"""
)


def test_the_error_of_a_second_engine_names_the_pid_of_the_first(
    open_tier: Opener, root: Path
) -> None:
    command = [sys.executable, "-c", HOLDER, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(CacheLockedError, match=f"pid {holder.pid} on host "):
            open_tier()
        holder.kill()
    open_tier()  # the lock dies with its holder


def test_a_tier_that_cannot_be_made_leaves_nothing_open(
    open_tier: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(capacity_slots: int) -> None:
        raise MemoryError

    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    close(open_tier())
    before = held()
    with monkeypatch.context() as patch:
        patch.setattr(slab, "SlotTable", fail)
        with pytest.raises(MemoryError):
            open_tier()
    assert held() == before
    open_tier()


def test_a_child_that_outlives_the_engine_does_not_keep_the_store(
    open_tier: Opener, root: Path
) -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-c", PARENT, str(root), str(reading)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[reading]) as parent:
        os.close(reading)
        assert parent.wait(60) == -signal.SIGKILL  # its child lives until the pipe is closed
        try:
            open_tier()
        finally:
            os.close(writing)
