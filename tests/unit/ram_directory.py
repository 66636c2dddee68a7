"""A place for stores that are opened thousands of times in one test."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["ram_directory"]

_TMPFS = Path("/dev/shm")


@contextlib.contextmanager
def ram_directory() -> Iterator[Path]:
    """Yield a directory in RAM, where a sync costs nothing, or on disk where there is none."""
    parent = _TMPFS if os.access(_TMPFS, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="faults-", dir=parent) as name:
        yield Path(name)
