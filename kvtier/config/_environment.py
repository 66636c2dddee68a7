"""The only reader of environment variables in kvtier."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Environment", "child_environment", "environment"]


@dataclass(frozen=True, slots=True)
class Environment:
    """What kvtier takes from the environment.

    Attributes:
        python_hash_seed: ``PYTHONHASHSEED``, the seed of the engine's block hashes; None if
            unset.
    """

    python_hash_seed: str | None


def environment() -> Environment:
    """Read the environment, now."""
    return Environment(python_hash_seed=os.environ.get("PYTHONHASHSEED"))


def child_environment() -> dict[str, str]:
    """Return the environment of a Python process that finds every module this one finds."""
    places = os.pathsep.join(place or str(Path.cwd()) for place in sys.path)
    return {**os.environ, "PYTHONPATH": places}
