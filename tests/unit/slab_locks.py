"""Locks that somebody else has, and time that passes while they are waited for."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from kvtier.tiers.slab.lock import Patience


class Clock:
    """Time that passes when somebody sleeps; what is due then happens."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.alarms: list[tuple[float, contextlib.ExitStack]] = []
        self.patience = Patience(timeout_s=10, clock=lambda: self.now_s, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds
        for at_s, stack in self.alarms:
            if self.now_s >= at_s:
                stack.close()


@contextlib.contextmanager
def held(directory: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the lock of ``directory``, as another process would: through another open file."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, kind)
        yield
    finally:
        os.close(fd)
