"""Reads and sets environment variables. No other module of kvtier does this."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["child_environment", "set_default_variables", "variable", "variables"]


def variable(name: str) -> str | None:
    """Return the current value of the environment variable ``name``; None if unset."""
    return os.environ.get(name)


def variables(names: re.Pattern[str]) -> list[tuple[str, str]]:
    """Return sorted (name, value) pairs of all variables with names that ``names`` matches."""
    return sorted(pair for pair in os.environ.items() if names.fullmatch(pair[0]))


def set_default_variables(defaults: Mapping[str, str]) -> None:
    """Set the variables that are unset, to configure a library that has no other settings."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def child_environment() -> dict[str, str]:
    """Return an environment that lets a child process import this process's Python modules."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path}
