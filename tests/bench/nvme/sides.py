"""Opens either peer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from vllm.utils.gc_utils import freeze_gc_heap

from tests.bench.nvme.engine_loop import EngineLoop, Side
from tests.bench.nvme.kvtier_side import open_kvtier
from tests.bench.nvme.native_side import open_native
from tests.bench.nvme.passes import TransferSpec

__all__ = ["opened"]


@contextlib.contextmanager
def opened(spec: TransferSpec) -> Iterator[EngineLoop]:
    """Yield an engine loop over the peer; opening and closing it is nobody's time.

    What vLLM and torch bring along is taken out of garbage collection, as vLLM's engine does
    when it is up: one look at all of it takes half a second.
    """
    side = _open(spec)
    freeze_gc_heap()
    try:
        yield EngineLoop(side, spec.workload)
    finally:
        side.close()


def _open(spec: TransferSpec) -> Side:
    chunk_nbytes, ram_nbytes = spec.workload.chunk_nbytes, spec.workload.ram_nbytes
    if spec.peer == "native_fs":
        return open_native(spec.path, chunk_nbytes=chunk_nbytes, ram_nbytes=ram_nbytes)
    return open_kvtier(
        spec.path,
        chunk_nbytes=chunk_nbytes,
        ram_nbytes=ram_nbytes,
        nvme_nbytes=spec.workload.nbytes,
    )
