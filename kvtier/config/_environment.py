"""The only user of environment variables in kvtier."""

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
    """Return the variables whose whole names match ``names``, as sorted (name, value) pairs."""
    return sorted(pair for pair in os.environ.items() if names.fullmatch(pair[0]))


def set_default_variables(defaults: Mapping[str, str]) -> None:
    """Set each unset variable, for a library that has no other settings."""
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def child_environment() -> dict[str, str]:
    """Return an environment that lets a child process import this process's Python modules."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path}
