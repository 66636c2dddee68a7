"""Failures that name the configuration that failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["naming"]


@contextmanager
def naming(**configuration: object) -> Iterator[None]:
    """Add ``configuration`` to an error that is raised in here, such as ``with tiers=1``."""
    try:
        yield
    except Exception as error:
        words = ", ".join(f"{name}={value!r}" for name, value in configuration.items())
        error.add_note(f"with {words}")
        raise
