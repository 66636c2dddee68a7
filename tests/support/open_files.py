"""Counts the files that this process has open."""

from __future__ import annotations

import gc
import time
from pathlib import Path

__all__ = ["assert_closed_again", "descriptors"]

_GRACE_S = 10.0


def descriptors() -> int:
    """Return the number of open descriptors, without those of garbage."""
    gc.collect()
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def assert_closed_again(before: int, where: str) -> None:
    """Assert that ``before`` descriptors are open, as :func:`descriptors` counts them.

    A thread drops its references to files a moment after it has posted its result, and an
    error's traceback keeps files until it is collected.
    """
    deadline_s = time.monotonic() + _GRACE_S
    while (left := descriptors()) != before and time.monotonic() < deadline_s:
        pass
    assert left == before, f"a descriptor is left open {where}"
