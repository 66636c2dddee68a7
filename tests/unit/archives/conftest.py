"""A store, an archive of it, and a second store to import into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.os.iopool import IoPool
from tests.unit.cache_shell import Shell
from tests.unit.stores import Store


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def archive(shell: Shell, store: Store, out: Path) -> Path:
    """An archive of a full store."""
    assert shell("export", store.filled().root, out).code == 0
    return out


@pytest.fixture
def other(tmp_path: Path, pool: IoPool) -> Iterator[Store]:
    """A second store, which does not exist yet."""
    other = Store(tmp_path / "other", pool)
    yield other
    other.stop()
