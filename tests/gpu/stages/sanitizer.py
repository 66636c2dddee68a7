"""A small correctness test under compute-sanitizer, which checks every access to memory."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.gpu.bench import Bench, SkippedStageError
from tests.gpu.stages.correctness import run_pytest

_FOUND_ERRORS: Final = 86
_PLACES: Final = ("/usr/local/cuda/bin/compute-sanitizer",)
# torch allocates large pieces and cuts them up: memcheck would not see the cuts.
_UNCACHED: Final = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
TEST: Final = "tests/gpu/test_copy_cuda.py"


def run(bench: Bench) -> None:
    """Run the test of round trips; what memcheck finds fails the stage."""
    program = shutil.which("compute-sanitizer") or next(
        (place for place in _PLACES if Path(place).exists()), None
    )
    if program is None:
        raise SkippedStageError("there is no compute-sanitizer")
    with tempfile.TemporaryDirectory(prefix="kvtier-gpu-") as scratch:
        log = Path(scratch) / "log"
        # Errors of API calls that torch makes to find something out, and handles, are none.
        sanitizer = [program, "--tool", "memcheck", "--report-api-errors", "no"]
        sanitizer += ["--error-exitcode", str(_FOUND_ERRORS), "--log-file", str(log)]
        tested = run_pytest([TEST, "-k", "bit_for_bit"], before=sanitizer, variables=_UNCACHED)
        said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    sys.stdout.write(said)
    if "not supported" in said:
        raise SkippedStageError(f"compute-sanitizer cannot run here: {said.strip()[:200]}")
    found = "memcheck found errors" if tested.code == _FOUND_ERRORS else "memcheck found none"
    bench.fact("memcheck", f"{tested}; {found}")
    bench.failed = tested.code != 0 or not tested.passed
