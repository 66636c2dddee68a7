"""Counting what code does and holds, where timing it would prove nothing."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from kvtier.policies import ChunkCopy

__all__ = ["count_entries", "count_lines", "reachable"]

_OPAQUE = (type, types.ModuleType, types.FunctionType, ChunkCopy, bytes, str, int, float)


def count_lines(work: Callable[[], object]) -> int:
    """Count the lines of Python that ``work`` runs outside :mod:`kvtier.testing`."""
    lines = 0

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:  # noqa: ANN401 - as sys says
        nonlocal lines
        if frame.f_globals.get("__name__", "").startswith("kvtier.testing."):
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def reachable(root: object) -> Iterator[object]:
    """Yield what the containers and objects below ``root`` hold, as often as they hold it."""
    seen: set[int] = set()
    pending: list[object] = [root]
    while pending:
        item = pending.pop()
        if id(item) in seen or isinstance(item, _OPAQUE):
            continue
        seen.add(id(item))
        held = gc.get_referents(item)
        yield from held
        pending += held


def count_entries(root: object) -> int:
    """Count what :func:`reachable` yields."""
    return sum(1 for _ in reachable(root))
