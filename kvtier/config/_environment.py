"""The only reader of environment variables in kvtier."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Environment", "environment"]


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
