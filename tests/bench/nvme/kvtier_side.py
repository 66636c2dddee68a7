"""kvtier as vLLM runs it: its manager, transfer engine, cache directory and threads."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.config import (
    KvtierConfig,
    NvmeTierConfig,
    PlacementConfig,
    RamTierConfig,
    TransferConfig,
)
from kvtier.connector.metrics import Reporter
from kvtier.connector.service import CacheService
from kvtier.connector.storage import Storage, open_storage
from kvtier.keys import ChunkKey
from kvtier.manager import GroupReach, Prompt
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.types import LayoutFingerprint
from tests.bench.nvme.engine_loop import Moved, WrongBytesError

__all__ = ["KvtierSide", "make_config", "make_region", "open_kvtier", "open_tiers"]

FINGERPRINT = LayoutFingerprint({"model": "bench"})
FILL_NBYTES = 16 << 20


def make_config(
    path: Path,
    *,
    ram_nbytes: int,
    nvme_nbytes: int,
) -> KvtierConfig:
    """Return a configuration with every default but the sizes, the backlog and the load path.

    The benchmark stores faster than any disk takes it; dropping what the disk is behind with
    would make it look faster than it is.
    """
    ram = RamTierConfig(capacity_bytes=ram_nbytes)
    nvme = NvmeTierConfig(path=path, capacity_bytes=nvme_nbytes)
    # The loop reads a slot when it is a hit, so all bytes must have arrived.
    transfer = TransferConfig(load_path="staged")
    placement = PlacementConfig(backlog_limit=1.0)
    return KvtierConfig(tiers=(ram, nvme), placement=placement, transfer=transfer)


def make_region(config: KvtierConfig, chunk_nbytes: int) -> HostRegion:
    """Return the RAM tier, every page in place."""
    slots = config.tiers[0].capacity_bytes // chunk_nbytes
    geometry = RegionGeometry(slots, chunk_nbytes, chunk_nbytes, 1)
    return HostRegion.create(f"bench-{os.getpid()}", geometry, attachers=0, timeout_s=1)


def open_kvtier(
    path: Path,
    *,
    chunk_nbytes: int,
    ram_nbytes: int,
    nvme_nbytes: int,
) -> KvtierSide:
    """Open the tiers below ``path``, recovering what is there."""
    config = make_config(path, ram_nbytes=ram_nbytes, nvme_nbytes=nvme_nbytes)
    region = make_region(config, chunk_nbytes)
    fill(region.payload)
    return KvtierSide(open_tiers(config, region), config)


def open_tiers(config: KvtierConfig, region: HostRegion) -> Storage:
    """Open the tiers of ``config``, with a token for each chunk."""
    return open_storage(
        config,
        region,
        FINGERPRINT,
        tokens_per_chunk=1,
        groups=[GroupReach(1)],
        record_events=False,
    )


def fill(memory: memoryview) -> None:
    """Fill ``memory`` with bytes that no disk can compress away."""
    piece = os.urandom(FILL_NBYTES)
    for start in range(0, len(memory), FILL_NBYTES):
        rest = memory[start : start + FILL_NBYTES]
        rest[:] = piece[: len(rest)]


class KvtierSide:
    """A :class:`~tests.bench.nvme.engine_loop.Side`; rank 0 of one is played by the caller."""

    def __init__(self, storage: Storage, config: KvtierConfig) -> None:
        cache = CacheService(
            storage, tokens_per_chunk=1, close_timeout_s=config.transfer.close_timeout_s
        )
        self.manager: Any = _Calls(cache)
        self.ram_share_for_waiting = config.placement.pin_budget
        self._storage = storage
        self._region = storage.region

    def look_up(self, keys: Sequence[ChunkKey], context: Any) -> int | None:
        """See :meth:`Side.look_up`."""
        hits: int | None = self.manager.look_up(keys, context)
        return hits

    def deposit(self, spec: Any, keys: Sequence[ChunkKey]) -> None:
        """Mark each slot with its key, then set its generation and acknowledge."""
        if not keys:
            return
        for slot, key in zip(spec.slots, keys, strict=True):
            self._region.slot(slot)[: len(key)] = key
        control = self._region.control
        control.set_generation(0, spec.slots, spec.generations[0])
        control.acknowledge(0, spec.slots)

    def collect(self, spec: Any, keys: Sequence[ChunkKey]) -> None:
        """Check each slot's generation and mark, then acknowledge."""
        if not keys:
            return
        control = self._region.control
        if not control.has_generations(0, spec.slots, spec.generations):
            raise WrongBytesError("a slot does not have the generation it was promised with")
        for slot, key in zip(spec.slots, keys, strict=True):
            if self._region.slot(slot)[: len(key)] != key:
                raise WrongBytesError(f"slot {slot} does not hold {key.hex()}")
        control.acknowledge(0, spec.slots)

    def moved(self, stats: Any) -> Moved:
        """See :meth:`Side.moved`; the engine counts for itself."""
        channels = self._storage.engine.statistics()
        return Moved(
            down=sum(channel.nbytes for pair, channel in channels.items() if pair[0] == "ram"),
            up=sum(channel.nbytes for pair, channel in channels.items() if pair[1] == "ram"),
        )

    def close(self) -> None:
        """Bring down what is dirty and close the store."""
        self.manager.shutdown()


class _Slots(NamedTuple):
    """Where the chunks of a job are, and the generations of their slots."""

    slots: Sequence[int]
    generations: Sequence[int]


class _StoreOutput(NamedTuple):
    """A store under the names that vLLM gives its parts."""

    keys_to_store: Sequence[ChunkKey]
    store_spec: _Slots


class _Calls:
    """A cache behind the method names of vLLM's managers, with one call for each lookup."""

    def __init__(self, cache: CacheService) -> None:
        self._cache = cache
        self._reporter = Reporter(cache)
        self.on_new_request = cache.begin_request
        self.on_request_finished = cache.end_request
        self.has_pending_work = cache.has_pending_work
        self.take_events = cache.take_events
        self.get_stats = self._reporter.take
        self.shutdown = cache.shutdown

    def look_up(self, keys: Sequence[ChunkKey], context: Any) -> int | None:
        return self._cache.lookup(context.req_id, Prompt((keys,), 0, len(keys)))

    def prepare_load(self, keys: Sequence[ChunkKey], context: Any) -> _Slots:
        plan = self._cache.prepare_load(keys, context.req_id)
        return _Slots(plan.slots, plan.generations)

    def complete_load(self, keys: Collection[ChunkKey], context: Any) -> None:
        self._cache.complete_load(keys, context)

    def prepare_store(self, keys: Sequence[ChunkKey], context: Any) -> _StoreOutput | None:
        plan = self._cache.prepare_store(keys, context.req_id)
        if plan is None:
            return None
        return _StoreOutput(plan.keys, _Slots(plan.slots, [plan.generation] * len(plan.slots)))

    def complete_store(self, keys: Collection[ChunkKey], context: Any) -> None:
        self._cache.complete_store(keys, context)

    def on_schedule_end(self, context: Any) -> None:
        self._cache.end_step(started=context.new_req_ids, preempted=context.preempted_req_ids)
