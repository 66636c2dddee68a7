"""The only reader of environment variables in kvtier."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

__all__ = ["child_environment", "variable", "variables"]


def variable(name: str) -> str | None:
    """Return the value of the environment variable ``name`` as it is now, or None."""
    return os.environ.get(name)


def variables(names: re.Pattern[str]) -> list[tuple[str, str]]:
    """Return names and values, sorted, of the variables whose names match ``names`` fully."""
    return sorted(pair for pair in os.environ.items() if names.fullmatch(pair[0]))


def child_environment() -> dict[str, str]:
    """Return an environment that lets a child process import this process's Python modules."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path}
