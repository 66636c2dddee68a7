"""The kernel for copies on a GPU: interpreted on the CPU, and compiled for a GPU.

Triton comes with vLLM, so these tests are among those with vLLM; they start no engine.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import triton

from kvtier.memory import cuda_kernel
from tests.integration.triton_kernels import ROOT, ptx_of, run_interpreted

HEADERS = Path(triton.__file__).parent / "backends/nvidia/include"
COPY = """
import sys
import numpy as np
from kvtier.memory.cuda_kernel import launch

copies = int(sys.argv[1])
chance = np.random.default_rng(copies)
words = chance.integers(1, 2100, copies)
starts = np.cumsum(words) - words
source = chance.integers(-(1 << 62), 1 << 62, words.sum())
destination = np.zeros(len(source) + 1, np.int64)
order = chance.permutation(copies)
table = np.zeros((copies + 3, 3), np.int64)  # further rows are of another job
table[:copies, 0] = destination.ctypes.data + 8 * starts[order]
table[:copies, 1] = source.ctypes.data + 8 * starts[order]
table[:copies, 2] = 8 * words[order]
launch(table, copies)
assert (destination[:-1] == source).all() and not destination[-1]
"""


@pytest.mark.parametrize("copies", [1, 11, 12, 13, 61])
def test_every_range_is_copied_whole_and_nothing_else(copies: int) -> None:
    run_interpreted(COPY, copies)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_kernel_compiles_for_a_gpu_and_asks_for_rows_ahead() -> None:
    ptx = ptx_of(cuda_kernel.copy_ranges, {"table": "i64", "copies": "i32"})
    loads = [line for line in ptx.splitlines() if "ld.global" in line or "st.global" in line]
    # Three words of the first row, three of the next, and only then this row's bytes.
    assert [line.split("ld.global")[0].strip().startswith("@") for line in loads[:7]] == [
        *[False] * 6,
        True,
    ]


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_driver_has_the_signatures_that_kvtier_calls(tmp_path: Path) -> None:
    shim = ROOT / "tests/support/cuda_shim.c"
    options = ["-shared", "-fPIC", "-Wall", "-Werror", "-DHAVE_CUDA_H", f"-I{HEADERS}"]
    subprocess.run(["cc", *options, "-o", str(tmp_path / "shim.so"), str(shim)], check=True)
