"""Runs a Triton kernel without a GPU: interpreted on the CPU, or compiled for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["ROOT", "ptx_of", "run_interpreted"]

ROOT = Path(__file__).parents[2]


def run_interpreted(program: str, argument: int) -> None:
    """Run ``program``, which gets ``argument``, in a process that interprets kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # noqa: TID251 - of another process
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(argument)],
        check=True,
        cwd=ROOT,
        env=environment,
    )


def ptx_of(kernel: Any, signature: Mapping[str, str]) -> str:
    """Compile ``kernel``, whose ``STEP`` is 1024, for an H100; return its PTX code."""
    compiled = triton.compile(
        ASTSource(
            fn=kernel,
            signature={**signature, "STEP": "constexpr"},
            constexprs={"STEP": 1024},
        ),
        target=GPUTarget("cuda", 90, 32),
    )
    assert compiled.asm["cubin"]
    ptx: str = compiled.asm["ptx"]
    return ptx
