"""The only reader of environment variables in kvtier."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Environment", "child_environment", "environment"]

_KV: Final = re.compile(
    r"VLLM_(\w+_QUANT_CONFIG|MARLIN_INPUT_DTYPE|CPU_INT4_W4A8|B12X_MOE_FP4_FORCE_A16"
    r"|ROCM_USE_AITER_MOE_(SITUV2|A4W4_DSV4)|ROCM_QUICK_REDUCE_QUANTIZATION"
    r"|ROCM_USE_AITER_FP[48]BMM|FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE"
    r"|ROCM_SHUFFLE_KV_CACHE_LAYOUT|MOE_ROUTING_SIMULATION_STRATEGY"
    r"|VIDEO_LOADER_BACKEND|MEDIA_CONNECTOR)"
)
"""How weights or activations are rounded to few bits, how a block's bytes are ordered, and
which frames of a video the model is shown."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What kvtier takes from the environment.

    Attributes:
        python_hash_seed: ``PYTHONHASHSEED``, the seed of the engine's block hashes; None if
            unset.
        kv: Names and values, in order, of the variables that change what vLLM's keys and values
            are or how they are kept, and of which neither a model's configuration nor a hash of
            tokens and media knows.
        vllm_in_process: Whether ``VLLM_ENABLE_V1_MULTIPROCESSING`` says that vLLM's engine runs
            in the process of its ``LLM``.
    """

    python_hash_seed: str | None
    kv: tuple[tuple[str, str], ...]
    vllm_in_process: bool


def environment() -> Environment:
    """Read the environment, now."""
    told = sorted(pair for pair in os.environ.items() if _KV.fullmatch(pair[0]))
    return Environment(
        python_hash_seed=os.environ.get("PYTHONHASHSEED"),
        kv=tuple(told),
        vllm_in_process=os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0",
    )


def child_environment() -> dict[str, str]:
    """Return the environment of a Python process that finds every module this one finds."""
    places = os.pathsep.join(place or str(Path.cwd()) for place in sys.path)
    return {**os.environ, "PYTHONPATH": places}
