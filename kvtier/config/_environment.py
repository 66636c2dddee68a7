"""The only reader of environment variables in kvtier."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Environment", "child_environment", "environment"]

_ROUNDING: Final = re.compile(r"VLLM_\w+_QUANT_CONFIG")


@dataclass(frozen=True, slots=True)
class Environment:
    """What kvtier takes from the environment.

    Attributes:
        python_hash_seed: ``PYTHONHASHSEED``, the seed of the engine's block hashes; None if
            unset.
        rounding: Names and values of the variables that tell vLLM how to round weights or
            activations, in order.
    """

    python_hash_seed: str | None
    rounding: tuple[tuple[str, str], ...]


def environment() -> Environment:
    """Read the environment, now."""
    rounding = sorted(pair for pair in os.environ.items() if _ROUNDING.fullmatch(pair[0]))
    return Environment(
        python_hash_seed=os.environ.get("PYTHONHASHSEED"), rounding=tuple(rounding)
    )


def child_environment() -> dict[str, str]:
    """Return the environment of a Python process that finds every module this one finds."""
    places = os.pathsep.join(place or str(Path.cwd()) for place in sys.path)
    return {**os.environ, "PYTHONPATH": places}
