"""Finds classes by name: built in, from installed packages, or named ``module:Class``.

Built-in classes are named by text, so reading a configuration does not import the classes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from kvtier.errors import ConfigError, did_you_mean

__all__ = ["CLASS_PATTERN", "NamedClasses"]

CLASS_PATTERN: Final = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""The form ``module:Class``, for a class that no package registers under a name."""


@dataclass(frozen=True, slots=True)
class NamedClasses:
    """The classes that one key of a configuration can name.

    Attributes:
        what: Word for such a class in messages.
        groups: The groups of entry points in which packages register such classes.
        built_in: The built-in classes, as ``module:Class`` by name.
    """

    what: str
    groups: tuple[str, ...]
    built_in: Mapping[str, str]

    def installed(self) -> tuple[str, ...]:
        """Return the names of all built-in and registered classes, sorted."""
        return tuple(sorted({*self.built_in, *self._registered()}))

    def obstacle(self, name: str) -> tuple[str, str] | None:
        """Return why the class ``name`` does not load, and a remedy; None if it loads.

        The result is also None for a built-in class, which this method does not import, and for
        an unknown name, which the caller must report.
        """
        point = None if name in self.built_in else self._point(name)
        if point is None:
            return None
        try:
            point.load()
        except Exception as error:  # noqa: BLE001 - the import runs third-party code
            return f"does not load: {error}", _remedy(point, error)
        return None

    def find(self, name: str) -> Any:  # noqa: ANN401 - may be of another package
        """Return the class called ``name``.

        Args:
            name: A built-in name, a registered name of an installed package, or
                ``module:Class``.

        Raises:
            ConfigError: No class has this name, or the class does not load.
        """
        point = self._point(name)
        if point is None:
            known = self.installed()
            remedy = f"or name a class as module:Class{did_you_mean(name, known)}"
            problem = f"unknown {self.what} {name!r}; installed: {', '.join(known)}"
            raise ConfigError(f"{problem}; {remedy}")
        try:
            return point.load()
        except Exception as error:  # the import runs third-party code
            problem = f"{self.what} {name!r} ({point.value}) does not load: {error}"
            raise ConfigError(f"{problem}; {_remedy(point, error)}") from error

    def find_derived(self, name: str, base: type[Any]) -> type[Any]:
        """Return the class ``name``; check that it derives from ``base`` and is complete.

        Raises:
            ConfigError: The class is unknown or not usable.
        """
        found = self.find(name)
        which = repr(found)
        if isinstance(found, type):
            which = f"{found.__module__}:{found.__qualname__}"
        problem = f"{self.what} {name!r}: {which}"
        package = ".".join(base.__module__.split(".")[:2])
        public = f"{package}.{base.__name__}"
        if not (isinstance(found, type) and issubclass(found, base)):
            raise ConfigError(f"{problem} is no {base.__name__}; derive it from {public}")
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        if missing:
            remedy = f"{public} says what each must do"
            raise ConfigError(f"{problem} leaves out {missing}; {remedy}")
        return found

    def _registered(self) -> dict[str, EntryPoint]:
        """Return the installed entry points by name; earlier groups take precedence."""
        return {
            point.name: point
            for group in reversed(self.groups)
            for point in entry_points(group=group)
        }

    def _point(self, name: str) -> EntryPoint | None:
        value = self.built_in.get(name)
        if value is None and re.fullmatch(CLASS_PATTERN, name):
            value = name
        if value is not None:
            return EntryPoint(name, value, self.groups[0])
        return self._registered().get(name)


def _remedy(point: EntryPoint, error: Exception) -> str:
    """Return a remedy for a class that does not load."""
    is_named = point.name == point.value
    if is_named and isinstance(error, AttributeError) and error.name == point.attr:
        module = sys.modules[point.module]
        known = [name for name in vars(module) if not name.startswith("_")]
        hint = did_you_mean(point.attr, known)
        return f"name a class that {point.module} has{hint}"
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if is_named and f"{point.module}.".startswith(f"{missing}."):
        return f"put the directory of {point.module} on PYTHONPATH, the engine's too"
    return "repair or remove the package that provides it"
