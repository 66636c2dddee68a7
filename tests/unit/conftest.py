"""Threads for I/O, a store, an engine in another process, and ``kvtier cache``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvtier.os.iopool import IoPool
from tests.unit.cache_shell import ROOT, Shell
from tests.unit.stores import Store

_ENGINE: Final = """
import pathlib, sys
from kvtier.os.iopool import IoPool
from tests.unit.stores import Store
store = Store(pathlib.Path(sys.argv[1]), IoPool(2, name="kvtier-engine"))
store.start()
store.fill()
print("running", flush=True)
sys.stdin.read()
store.stop()
"""


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    return Shell(monkeypatch, capsys, "cache")


@pytest.fixture
def pool() -> Iterator[IoPool]:
    pool = IoPool(2, name="kvtier-test")
    yield pool
    assert pool.close(timeout_s=10)


@pytest.fixture
def store(tmp_path: Path, pool: IoPool) -> Iterator[Store]:
    store = Store(tmp_path / "store", pool)
    yield store
    store.stop()


@pytest.fixture
def other_engine(store: Store) -> Iterator[subprocess.Popen[bytes]]:
    """An engine in another process that has the store open."""
    with subprocess.Popen(
        [sys.executable, "-c", _ENGINE, str(store.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"running\n"
        yield engine
        engine.kill()
