"""The kernel that hashes GPU memory: interpreted on the CPU, and compiled for a GPU.

Triton comes with vLLM, so these tests are among those with vLLM; they start no engine.
"""

from __future__ import annotations

import pytest

from kvtier.memory import cuda_hash
from tests.integration.triton_kernels import ptx_of, run_interpreted

HASH = """
import sys
import numpy as np
from kvtier.memory.cuda_hash import launch
from kvtier.memory.part_hashes import hash_on_host

ranges = int(sys.argv[1])
chance = np.random.default_rng(ranges)
words = chance.integers(1, 2100, ranges)
starts = np.cumsum(words) - words
content = chance.integers(-(1 << 63), (1 << 63) - 1, words.sum())
table = np.full((ranges + 2, 4), 77, np.int64)  # further rows are of another launch
table[:ranges, 0] = content.ctypes.data + 8 * starts
table[:ranges, 1] = chance.integers(0, 1 << 40, ranges)
table[:ranges, 2] = words
sums = np.full((ranges + 2, 1), 5, np.int64)
launch(table, sums, ranges)
assert (sums[:ranges, 0].view(np.uint64) == hash_on_host(table[:ranges])).all()
assert (sums[ranges:] == 5).all()
"""


@pytest.mark.parametrize("ranges", [1, 2, 17])
def test_the_kernel_computes_the_hashes_that_the_cpu_computes(ranges: int) -> None:
    run_interpreted(HASH, ranges)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_kernel_compiles_for_a_gpu_with_unsigned_shifts() -> None:
    ptx = ptx_of(cuda_hash.hash_ranges, {"table": "i64", "sums": "i64"})
    assert "shr.u64" in ptx
    assert "atom." not in ptx
