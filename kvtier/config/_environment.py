"""The only reader of environment variables in kvtier."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

__all__ = ["child_environment", "variable", "variables"]


def variable(name: str) -> str | None:
    """Return the current value of the environment variable ``name``; None if it is not set."""
    return os.environ.get(name)


def variables(names: re.Pattern[str]) -> list[tuple[str, str]]:
    """Return the variables that ``names`` matches in full, as sorted (name, value) pairs."""
    return sorted(pair for pair in os.environ.items() if names.fullmatch(pair[0]))


def child_environment() -> dict[str, str]:
    """Return an environment that lets a child process import this process's Python modules."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path}
