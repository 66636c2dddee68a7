"""Values of options that the command line's types let through and no command can use."""

from __future__ import annotations

import math
from collections.abc import Iterable

import typer

from kvtier.errors import ConfigError, did_you_mean

__all__ = ["choice", "finite"]


def choice(option: str, value: str, known: Iterable[str]) -> str:
    """Return ``value``, which must be one of ``known``.

    Raises:
        ConfigError: It is not.
    """
    names = list(known)
    if value not in names:
        hint = did_you_mean(value, names)
        remedy = f"write one of {', '.join(names)}{hint}"
        raise ConfigError(f"{option} {value}: not a choice; {remedy}")
    return value


def finite(value: float | None) -> float | None:
    """Return ``value``, a number that can be computed with, or None.

    Raises:
        typer.BadParameter: It is infinite.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("not a finite number")
    return value
