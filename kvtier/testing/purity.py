"""Finding out whether code that only decides does or keeps anything else.

A policy is given time and randomness; one that takes them from elsewhere, or reads a file, is
different live and in a simulator. Such things end in a call in C, whatever they were imported
as, and the interpreter reports those.
"""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kvtier.policies import ChunkCopy
from kvtier.testing.counting import reachable

__all__ = ["contents_of", "held_by", "impure_calls"]

_OUTWARD: Final = frozenset(
    [
        "time",
        "datetime",
        "posix",
        "_io",
        "_socket",
        "select",
        "_thread",
        "_sqlite3",
        "_random",
        "_uuid",
    ]
)
_HARMLESS: Final = frozenset(["fspath"])
_CLOCKS: Final = frozenset(["now", "today", "utcnow"])
"""What of ``datetime`` reads a clock; the rest only reckons."""


@contextmanager
def impure_calls(rng: random.Random) -> Iterator[list[str]]:
    """Collect the names of clocks, generators and system calls that are called in here.

    Args:
        rng: The generator that may be used.
    """
    found: list[str] = []

    def on_call(_: types.FrameType, event: str, called: Any) -> None:  # noqa: ANN401 - as sys says
        if event != "c_call":
            return
        owner = getattr(called, "__self__", None)
        kind = owner if isinstance(owner, types.ModuleType | type) else type(owner)
        home = getattr(called, "__module__", None) or getattr(kind, "__module__", "")
        name = called.__name__
        if isinstance(owner, random.Random):
            home = "" if owner is rng else "random"
        if home == "datetime" and name not in _CLOCKS:
            return
        if name not in _HARMLESS and (home in _OUTWARD or home == "random"):
            found.append(f"{home}.{name}")

    before = sys.getprofile()
    sys.setprofile(on_call)
    try:
        yield found
    finally:
        sys.setprofile(before)


def contents_of(copy: ChunkCopy) -> dict[str, object]:
    """Return what ``copy`` says, to see later whether somebody wrote to it."""
    return {name: getattr(copy, name) for name in ChunkCopy.__slots__}


def held_by(policy: object) -> tuple[int, int]:
    """Return how many copies ``policy`` refers to, and how many different keys."""
    held = list(reachable(policy))
    copies = sum(isinstance(item, ChunkCopy) for item in held)
    return copies, len({item for item in held if isinstance(item, bytes)})
