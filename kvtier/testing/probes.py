"""Counts steps and references, and finds impure calls, for the policy contracts.

Work is counted in steps, because timings vary. Here a step is one line of Python. But a line
may do any amount of work in C. So a built-in function that iterates over an argument adds a
step for each item. A method that iterates over a list or a deque adds a step for each element.
Only calls in the examined packages add such steps. A slice, ``in`` on a list and a comparison
of containers add none.

A policy gets time and random numbers as arguments. A policy that reads a clock, another
generator or a file could behave differently in a live engine and in a simulator. Such reads
call C functions, and the interpreter reports these calls.
"""

from __future__ import annotations

import builtins
import gc
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

from typing_extensions import override

from kvtier.policies import ChunkCopy

__all__ = [
    "count_entries",
    "count_steps",
    "fields_of",
    "held_by",
    "impure_calls",
    "noting",
    "packages_of",
    "reachable",
]

_OPAQUE = (type, types.ModuleType, types.FunctionType, ChunkCopy, bytes, str, int, float)
_WALKING: Final = (sorted, min, max, sum, any, all, list, tuple, set, frozenset)
_WALKING_METHODS: Final = frozenset(
    ["copy", "count", "index", "insert", "remove", "reverse", "sort"]
)
_LISTS: Final = (list, deque)
_CALLS_IN_C: Final = frozenset(["c_call", "c_return"])
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
"""Functions of ``datetime`` that read a clock."""


def count_steps(work: Callable[[], object], *, packages: Collection[str] = ()) -> int:
    """Return the number of steps of ``work``. This module's docstring defines a step.

    Lines of :mod:`kvtier.testing` do not count. Only calls in ``packages`` of C functions add
    steps.
    """
    return _Counter(packages).run(work)


def packages_of(item: object) -> frozenset[str]:
    """Return the top-level packages that define the class of ``item`` and its base classes.

    Packages of the standard library are left out.
    """
    names = {kind.__module__.partition(".")[0] for kind in type(item).__mro__}
    return frozenset(names - sys.stdlib_module_names)


class _Counter:
    def __init__(self, packages: Collection[str]) -> None:
        self._packages = packages
        self._steps = 0
        self._changed: dict[int, dict[str, Any]] = {}
        self._ends: list[object] = []
        self._charging = {kind.__name__: self._charged(kind) for kind in _WALKING}

    def run(self, work: Callable[[], object]) -> int:
        """Run ``work`` and return the number of its steps, as the module defines a step."""
        trace, profile = sys.gettrace(), sys.getprofile()
        collects = gc.isenabled()
        gc.disable()  # finalizers of earlier garbage would count
        sys.settrace(self._on_line)
        if self._packages:
            sys.setprofile(self._on_call)
        try:
            work()
        finally:
            sys.setprofile(profile)
            sys.settrace(trace)
            if collects:
                gc.enable()
            for names in self._changed.values():
                for name, charging in self._charging.items():
                    if names.get(name) is charging:
                        del names[name]
        return self._steps

    def _on_line(self, frame: types.FrameType, event: str, _: Any) -> Any:  # noqa: ANN401 - as sys says
        names = frame.f_globals
        if names.get("__name__", "").startswith("kvtier.testing."):
            return None
        if event == "call" and id(names) not in self._changed and self._counts(frame):
            self._changed[id(names)] = names
            for name, charging in self._charging.items():
                names.setdefault(name, charging)
        self._steps += event == "line"
        return self._on_line

    def _on_call(self, frame: types.FrameType, event: str, called: Any) -> None:  # noqa: ANN401 - as sys says
        if event not in _CALLS_IN_C:
            return
        owner = getattr(called, "__self__", None)
        if not isinstance(owner, _LISTS) or not self._counts(frame):
            return
        if event == "c_call" and called.__name__ in _WALKING_METHODS:
            self._steps += len(owner)
        elif called.__name__ == "pop" and isinstance(owner, list):
            self._on_pop(owner, event)

    def _on_pop(self, owner: list[Any], event: str) -> None:
        """Count the items that a list moves when ``pop`` removes an item before the last."""
        if event == "c_call":
            plain = len(owner) < 2 or owner[-1] is owner[-2]
            self._ends.append(None if plain else owner[-1])
        elif self._ends and (end := self._ends.pop()) is not None and owner[-1:] == [end]:
            self._steps += len(owner)

    def _counts(self, frame: types.FrameType) -> bool:
        name = frame.f_globals.get("__name__", "")
        return name.partition(".")[0] in self._packages and not name.startswith(
            "kvtier.testing."
        )

    def _charge(self, items: Any) -> Iterable[Any]:  # noqa: ANN401 - anything iterable
        if hasattr(items, "__len__"):
            self._steps += len(items)
            return cast("Iterable[Any]", items)
        return self._charge_each(items)

    def _charge_each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._steps += 1
            yield item

    def _charged(self, walking: Any) -> Any:  # noqa: ANN401 - any of the built-in ones
        """Return a stand-in for a built-in such as ``sum`` that counts each iterated item."""
        if isinstance(walking, type):
            return _stand_in_for(walking, self._charge)

        stops_early = walking in {builtins.any, builtins.all}
        charge = self._charge_each if stops_early else self._charge

        def charging(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - as the original
            # Several arguments of min and max are compared, not walked through.
            if len(args) == 1 or walking is builtins.sum:
                args = (charge(args[0]), *args[1:])
            return walking(*args, **options)

        return charging


def _stand_in_for(
    kind: type[Any], charge: Callable[[Iterable[Any]], Iterable[Any]]
) -> type[Any]:
    """Return a stand-in for class ``kind`` that passes its arguments through ``charge``."""

    class Meta(type):
        @override
        def __call__(cls, *args: Any) -> Any:
            return kind(*map(charge, args))

        @override
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, kind)

    return Meta(kind.__name__, (kind,), {})


def reachable(root: object) -> Iterator[object]:
    """Yield every object that ``root`` refers to, also indirectly, once per reference.

    References from classes, modules, functions, copies and plain values are ignored.
    """
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
    """Return the number of references that :func:`reachable` finds from ``root``."""
    return sum(1 for _ in reachable(root))


@contextmanager
def impure_calls(rng: random.Random) -> Iterator[list[str]]:
    """Collect the clock, random and system functions that the ``with`` block calls.

    ``rng`` is the only permitted random generator.
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


def fields_of(copy: ChunkCopy) -> dict[str, object]:
    """Return the fields of ``copy``, so that a test can detect later changes."""
    return {name: getattr(copy, name) for name in ChunkCopy.__slots__}


def held_by(policy: object) -> tuple[int, int]:
    """Return how often ``policy`` refers to a copy, and to how many distinct keys."""
    held = list(reachable(policy))
    copies = sum(isinstance(item, ChunkCopy) for item in held)
    return copies, len({item for item in held if isinstance(item, bytes)})


@contextmanager
def noting(**configuration: object) -> Iterator[None]:
    """Add a note such as ``with tiers=1`` to an error that the ``with`` block raises."""
    try:
        yield
    except Exception as error:
        words = ", ".join(f"{name}={value!r}" for name, value in configuration.items())
        error.add_note(f"with {words}")
        raise
