"""vLLM's own tiering: its TieringOffloadingManager over its file system tier, all defaults."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier.keys import ChunkKey
from tests.bench.nvme.engine_loop import Moved, WrongBytesError
from tests.bench.nvme.kvtier_side import fill

__all__ = ["NativeSide", "look_up", "open_native"]


def open_native(path: Path, *, chunk_nbytes: int, ram_nbytes: int) -> NativeSide:
    """Build the manager as vLLM's scheduler does, over the files below ``path``."""
    spec = TieringOffloadingSpec(
        OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("layer",), 0),),
            worker_kv_bytes_per_block=chunk_nbytes,
            enable_kv_cache_events=False,
            extra_config={
                "cpu_bytes_to_use": ram_nbytes,
                "secondary_tiers": [{"type": "fs", "root_dir": str(path)}],
            },
            engine_id=f"kvtier-bench-{os.getpid()}",
            model=OffloadingModelConfig("bench", "float16"),
            cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=OffloadingParallelConfig(
                rank=0,
                world_size=1,
                tp_size=1,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=False,
            ),
        )
    )
    return NativeSide(spec.get_manager(), chunk_nbytes)


class NativeSide:
    """A :class:`~tests.bench.nvme.engine_loop.Side`."""

    def __init__(self, manager: Any, chunk_nbytes: int) -> None:
        self.manager = manager
        self.ram_share_for_waiting = 1.0
        self._chunk_nbytes = chunk_nbytes
        self._memory = manager.primary_tier.get_kv_memoryview().cast("B")
        fill(self._memory)
        self._moved = Moved()
        self._closed = False

    def look_up(self, keys: Sequence[ChunkKey], context: Any) -> int | None:
        """See :meth:`Side.look_up`."""
        return look_up(self.manager, keys, context)

    def deposit(self, spec: Any, keys: Sequence[ChunkKey]) -> None:
        """Mark each slot with its key."""
        for slot, key in zip(spec.chunk_ids.tolist(), keys, strict=True):
            start = slot * self._chunk_nbytes
            self._memory[start : start + len(key)] = key

    def collect(self, spec: Any, keys: Sequence[ChunkKey]) -> None:
        """Check each slot's mark."""
        if not keys:
            return
        for slot, key in zip(spec.chunk_ids.tolist(), keys, strict=True):
            start = slot * self._chunk_nbytes
            if self._memory[start : start + len(key)] != key:
                raise WrongBytesError(f"slot {slot} does not hold {key.hex()}")

    def moved(self, stats: Any) -> Moved:
        """See :meth:`Side.moved`; vLLM reports each step's difference."""
        if stats is not None:
            values = stats.data["data"]
            for name, what in (
                (TieringOffloadingMetrics.WRITE_BYTES, "down"),
                (TieringOffloadingMetrics.READ_BYTES, "up"),
            ):
                total = getattr(self._moved, what) + sum(values.get(name, {}).values())
                setattr(self._moved, what, total)
        return Moved(self._moved.down, self._moved.up)

    def close(self) -> None:
        """Stop the threads and free the memory."""
        if not self._closed:
            self._closed = True
            self._memory.release()
            self.manager.shutdown()


def look_up(manager: Any, keys: Sequence[ChunkKey], context: Any) -> int | None:
    """Return how many leading ``keys`` are hits, or None when the answer is deferred."""
    hits, deferred = 0, False
    for key in keys:
        answer = manager.lookup(key, context)
        if answer is LookupResult.MISS:
            break
        if answer is not LookupResult.HIT:
            deferred = True
        if answer is not LookupResult.RETRY:
            hits += 1
    return None if deferred else hits
