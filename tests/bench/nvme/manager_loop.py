"""Times a manager's calls, of vLLM's interface or of the like of it.

Only the calls are timed; the workers' part and the making of requests are not.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

from vllm.v1.kv_offload.base import ScheduleEndContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvtier.config import KvtierConfig, RamTierConfig
from kvtier.keys import ChunkKey
from tests.bench.nvme.engine_loop import make_context
from tests.bench.nvme.errors import BenchError
from tests.bench.nvme.kvtier_side import KvtierSide, make_region, open_tiers
from tests.bench.nvme.manager_cost import ManagerCost, ManagerPeer
from tests.bench.nvme.native_side import look_up
from tests.bench.nvme.workload import Request, make_request

__all__ = ["measure"]

P = ParamSpec("P")
T = TypeVar("T")

_CHUNKS = 100_000
_PER_REQUEST = 64
_CAPACITY = _CHUNKS // 2
_SLOT_NBYTES = 4096


class _Workers(Protocol):
    manager: Any

    def look_up(self, keys: Sequence[ChunkKey], context: Any) -> int | None: ...

    def deposit(self, spec: Any, keys: Sequence[ChunkKey]) -> None: ...

    def collect(self, spec: Any, keys: Sequence[ChunkKey]) -> None: ...


class _NativeLru:
    """vLLM's manager of one RAM tier; its workers have nothing to tell it."""

    def __init__(self) -> None:
        self.manager: Any = CPUOffloadingManager(num_chunks=_CAPACITY, cache_policy="lru")

    def look_up(self, keys: Sequence[ChunkKey], context: Any) -> int | None:
        """See :meth:`Side.look_up`."""
        return look_up(self.manager, keys, context)

    def deposit(self, spec: Any, keys: Sequence[ChunkKey]) -> None:
        """Do nothing."""

    def collect(self, spec: Any, keys: Sequence[ChunkKey]) -> None:
        """Do nothing."""


class _Stopwatch:
    """Sums up the time of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def call(self, what: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``what`` and count its time."""
        began_s = time.perf_counter()
        result = what(*args, **kwargs)
        self.seconds += time.perf_counter() - began_s
        return result


def measure(peer: ManagerPeer) -> ManagerCost:
    """Store 100,000 chunks into room for half of them, then load what is left.

    Raises:
        BenchError: A manager kept less than it has room for.
    """
    requests = [
        make_request(str(number), _PER_REQUEST) for number in range(_CHUNKS // _PER_REQUEST)
    ]
    kept = requests[-(_CAPACITY // _PER_REQUEST) :]
    # As vLLM's engine core does once it is up: what is loaded by now is not searched again.
    gc.collect()
    gc.freeze()
    with _opened(peer) as workers:
        store_s = sum(_store(workers, request) for request in requests)
        load_s = sum(_load(workers, request) for request in kept)
    return ManagerCost(
        store_us=store_s / (len(requests) * _PER_REQUEST) * 1e6,
        load_us=load_s / (len(kept) * _PER_REQUEST) * 1e6,
    )


@contextlib.contextmanager
def _opened(peer: ManagerPeer) -> Iterator[_Workers]:
    if peer == "native_lru":
        yield _NativeLru()
        return
    ram = RamTierConfig(capacity_bytes=_CAPACITY * _SLOT_NBYTES)
    if peer == "kvtier":
        ram = ram.model_copy(update={"eviction": "lru"})
    config = KvtierConfig(tiers=(ram,))
    region = make_region(config, _SLOT_NBYTES)
    side = KvtierSide(open_tiers(config, region), config)
    try:
        yield side
    finally:
        side.close()


def _store(workers: _Workers, request: Request) -> float:
    manager, watch, context = workers.manager, _Stopwatch(), make_context(request)
    watch.call(manager.on_new_request, context)
    watch.call(workers.look_up, request.keys, context)
    watch.call(manager.on_schedule_end, ScheduleEndContext([request.req_id], ()))
    plan = watch.call(manager.prepare_store, list(request.keys), context)
    workers.deposit(plan.store_spec, plan.keys_to_store)
    if len(plan.keys_to_store) != _PER_REQUEST:
        raise BenchError(f"{type(manager).__name__} did not take a request it has room for")
    watch.call(manager.complete_store, set(plan.keys_to_store), context)
    watch.call(manager.on_request_finished, context)
    return watch.seconds


def _load(workers: _Workers, request: Request) -> float:
    manager, watch, context = workers.manager, _Stopwatch(), make_context(request)
    watch.call(manager.on_new_request, context)
    hits = watch.call(workers.look_up, request.keys, context)
    if hits != _PER_REQUEST:
        raise BenchError(f"{type(manager).__name__} kept {hits} of {_PER_REQUEST} chunks")
    spec = watch.call(manager.prepare_load, list(request.keys), context)
    watch.call(manager.on_schedule_end, ScheduleEndContext([request.req_id], ()))
    workers.collect(spec, request.keys)
    watch.call(manager.complete_load, set(request.keys), context)
    watch.call(manager.on_request_finished, context)
    return watch.seconds
