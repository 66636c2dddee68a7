"""Options of which there are a few to choose from."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier.errors import ConfigError

__all__ = ["choice"]


def choice(option: str, value: str, known: Iterable[str]) -> str:
    """Return ``value``, which must be one of ``known``.

    Raises:
        ConfigError: It is not.
    """
    names = list(known)
    if value not in names:
        raise ConfigError(f"{option} {value}: not a choice; write one of {', '.join(names)}")
    return value
