"""Waiting for a store's locks: no longer than a deadline, and no longer than needed."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from pathlib import Path

import pytest

from kvtier.cli import _cache
from kvtier.errors import CacheLockedError, ConfigError
from kvtier.os.block_io import BlockIo
from kvtier.tiers.slab import index_reader, inspect, maintain
from kvtier.tiers.slab.inspect import holder_of
from kvtier.tiers.slab.lock import Patience, acquire
from kvtier.tiers.slab.namespace import open_root
from tests.unit.cache_shell import READING, Shell
from tests.unit.slab_locks import Clock, held
from tests.unit.stores import Store


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize("kind", [fcntl.LOCK_EX, fcntl.LOCK_SH], ids=["opening", "looking"])
def test_an_engine_gives_up_on_a_store_that_another_process_keeps_locked(
    tmp_path: Path, clock: Clock, kind: int
) -> None:
    with (
        held(tmp_path, kind),
        pytest.raises(CacheLockedError, match="that is still opening it") as caught,
        open_root("nvme", tmp_path, BlockIo(), clock.patience),
    ):
        pytest.fail("it was not locked")
    assert str(tmp_path) in str(caught.value)
    assert 110 <= clock.now_s < 111
    with open_root("nvme", tmp_path, BlockIo(), Patience(timeout_s=0)):
        pass  # nothing was left locked


def test_an_engine_waits_for_a_store_until_it_is_free(tmp_path: Path, clock: Clock) -> None:
    with contextlib.ExitStack() as other:
        other.enter_context(held(tmp_path))
        clock.alarms.append((103, other))
        with open_root("nvme", tmp_path, BlockIo(), clock.patience):
            assert 103 <= clock.now_s < 104


def test_io_of_an_engine_that_died_is_waited_for_and_not_for_ever(
    tmp_path: Path, clock: Clock
) -> None:
    nobody = f"pid {2**22 + 1} on host {os.uname().nodename}"  # beyond the largest there is
    with held(tmp_path):
        (tmp_path / "lock").write_text(nobody)
        with pytest.raises(CacheLockedError, match=nobody) as caught:
            acquire("nvme", tmp_path, BlockIo(), clock.patience)
    assert 110 <= clock.now_s < 111
    assert f"fuser -v {tmp_path} names the process" in str(caught.value)
    assert "stop the other engine" not in str(caught.value)


def test_an_engine_that_lives_is_not_waited_for(tmp_path: Path, clock: Clock) -> None:
    with held(tmp_path):
        (tmp_path / "lock").write_text(f"pid {os.getpid()} on host {os.uname().nodename}")
        with pytest.raises(CacheLockedError, match=f"pid {os.getpid()}"):
            acquire("nvme", tmp_path, BlockIo(), clock.patience)
    assert clock.now_s == 100


def test_a_reader_waits_until_a_store_is_open(store: Store, clock: Clock) -> None:
    store.filled()
    with contextlib.ExitStack() as other:
        other.enter_context(held(store.root))
        clock.alarms.append((103, other))
        assert holder_of(store.directory, clock.patience) is None
    assert 103 <= clock.now_s < 104


def test_a_reader_of_a_locked_store_gives_up_in_time(store: Store, clock: Clock) -> None:
    store.filled()
    with (
        held(store.root),
        pytest.raises(ConfigError, match=f"another process is opening {store.root}; try again"),
    ):
        holder_of(store.directory, clock.patience)
    assert 110 <= clock.now_s < 111


def test_a_writer_waits_for_the_readers_of_a_store(store: Store, clock: Clock) -> None:
    store.filled()
    (space,) = inspect.find_namespaces(store.root)
    with contextlib.ExitStack() as reader:
        reader.enter_context(held(store.directory, fcntl.LOCK_SH))
        clock.alarms.append((103, reader))
        with maintain.hold(space, "stop it", clock.patience):
            assert 103 <= clock.now_s < 104


def test_a_writer_does_not_wait_for_an_engine(store: Store, clock: Clock) -> None:
    store.start()
    (space,) = inspect.find_namespaces(store.root)
    with (
        pytest.raises(ConfigError, match=f"in use by pid {os.getpid()} .*; stop it"),
        maintain.hold(space, "stop it", clock.patience),
    ):
        pytest.fail("it was not locked")
    assert clock.now_s == 100


@pytest.mark.parametrize("command", [*READING, ["evict", "--all", "--yes"]], ids=lambda c: c[0])
def test_no_command_hangs_on_a_store_that_another_process_keeps_locked(
    shell: Shell,
    store: Store,
    clock: Clock,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patient = functools.partial(holder_of, patience=clock.patience)
    for module in (index_reader, _cache):
        monkeypatch.setattr(module, "holder_of", patient)
    patient_hold = functools.partial(maintain.hold, patience=clock.patience)
    monkeypatch.setattr(maintain, "hold", patient_hold)
    store.filled()
    problem = f"another process is opening {store.root}; try again"
    with held(store.root):
        if command == ["stat"]:
            (report,) = shell.json("stat", store.root)["namespaces"]
            assert report["problem"] == problem
        else:
            ran = shell(command[0], store.root, *command[1:])
            assert (ran.code, ran.err) == (2, f"error: {problem}\n")
    assert clock.now_s >= 110
    assert shell("verify", store.root).code == 0
