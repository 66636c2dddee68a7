"""Options that are quantities, with their unit in the value."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvtier.errors import ConfigError
from kvtier.units import UnitError

__all__ = ["quantity"]

T = TypeVar("T")


def quantity(option: str, text: str, parse: Callable[[str], T]) -> T:
    """Return what ``text`` means to ``parse``, a function of :mod:`kvtier.units`.

    Raises:
        ConfigError: It means nothing; names the option.
    """
    try:
        return parse(text)
    except UnitError as error:
        raise ConfigError(f"{option} {text}: {error}") from error
