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
"""Variables that change quantization, the byte order of a block, or the frames of a video."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Environment variables that kvtier uses.

    Attributes:
        python_hash_seed: ``PYTHONHASHSEED``, the seed of the engine's block hashes, or None.
        kv: Names and values, sorted, of variables that change the KV that vLLM computes, but
            neither the model's configuration nor the hashes of tokens and media.
        vllm_in_process: Whether ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` runs vLLM's engine in the
            process of its ``LLM``.
    """

    python_hash_seed: str | None
    kv: tuple[tuple[str, str], ...]
    vllm_in_process: bool


def environment() -> Environment:
    """Return the variables as they are now."""
    kv = sorted(pair for pair in os.environ.items() if _KV.fullmatch(pair[0]))
    return Environment(
        python_hash_seed=os.environ.get("PYTHONHASHSEED"),
        kv=tuple(kv),
        vllm_in_process=os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0",
    )


def child_environment() -> dict[str, str]:
    """Return an environment in which a child process finds the same Python modules."""
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path}
