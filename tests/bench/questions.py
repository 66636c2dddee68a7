"""``python -m tests.bench.questions FILE.yaml``: what a request pays that nobody has stored.

Requests of many lengths are looked up one after the other, as vLLM's scheduler does it: a
lookup in each step until there is an answer, and the end of each step. They find nothing,
neither in the local tiers nor in the shared tier, which is the last in FILE.yaml. The same
requests are looked up without the shared tier, in turn with the others, so that the difference
is what the shared tier adds. The numbers are medians, with 90th percentiles in parentheses.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Final

from kvtier.config import KvtierConfig, load_config
from kvtier.connector.service import CacheService
from kvtier.connector.storage import open_storage
from kvtier.keys import ChunkKey, make_key
from kvtier.manager import GroupReach, Prompt
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.types import LayoutFingerprint

CHUNK_NBYTES: Final = 2 << 20
LENGTHS: Final = (16, 256, 1024, 4096)
STEP_S: Final = 0.0005
"""Time between two lookups: an engine without work steps about that often."""


@contextlib.contextmanager
def opened(config: KvtierConfig, name: str) -> Iterator[CacheService]:
    """Open the tiers of ``config`` without an engine."""
    slots = config.ram.capacity_bytes // CHUNK_NBYTES
    geometry = RegionGeometry(slots, CHUNK_NBYTES, CHUNK_NBYTES, 1)
    region = HostRegion.create(f"{name}-{os.getpid()}", geometry, attachers=0, timeout_s=1)
    storage = open_storage(
        config,
        region,
        LayoutFingerprint({"model": "bench"}),
        tokens_per_chunk=16,
        groups=[GroupReach(1)],
        record_events=False,
    )
    service = CacheService(storage, tokens_per_chunk=16, close_timeout_s=10)
    try:
        yield service
    finally:
        service.shutdown()


CLOCKS: Final = {"time": time.perf_counter, "processor time": time.thread_time}
"""Clocks for the calls of the scheduler's thread; each request uses one of them."""


def look_up(
    service: CacheService, keys: Sequence[ChunkKey], clock: Callable[[], float]
) -> tuple[float, float]:
    """Look up a new request until it is answered, in the calls of a scheduler's steps.

    Returns:
        Seconds until the answer, and seconds on ``clock`` in calls of the scheduler's thread.
    """
    request = SimpleNamespace(req_id=secrets.token_hex(4), kv_transfer_params=None)
    prompt = Prompt([keys], 0, len(keys))
    service.begin_request(request)
    begin_s = time.perf_counter()
    thread_s = 0.0
    tokens = None
    while tokens is None:
        if thread_s:
            time.sleep(STEP_S)
        call_s = clock()
        tokens = service.lookup(request.req_id, prompt)
        if tokens is not None:
            service.end_step(started=(request.req_id,), preempted=())
        elif not service.is_idle:
            service.end_step(started=(), preempted=())
        thread_s += clock() - call_s
    waited_s = time.perf_counter() - begin_s
    if tokens:
        raise RuntimeError(f"a new prompt hits {tokens} tokens")
    service.end_request(request)
    service.end_step(started=(), preempted=())
    return waited_s, thread_s


def report(what: str, values: Sequence[float], unit: str) -> None:
    """Print the median and the 90th percentile."""
    scale = {"ms": 1e3, "us": 1e6}[unit]
    ordered = sorted(value * scale for value in values)
    p90 = ordered[int(0.9 * len(ordered))]
    sys.stdout.write(f"  {what:14s} {statistics.median(ordered):8.2f} ({p90:.2f}) {unit}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.questions")
    parser.add_argument("file", type=Path, help="configuration; its last tier is shared")
    parser.add_argument("--requests", type=int, default=200, help="requests of each length")
    options = parser.parse_args()
    config = load_config(options.file)
    if not config.tiers[-1].is_shared:
        sys.exit(f"{options.file}: the last tier is not shared")
    alone = config.model_copy(update={"tiers": config.tiers[:-1]})
    waits: dict[int, list[float]] = {length: [] for length in LENGTHS}
    added: dict[tuple[int, str], list[float]] = {
        (length, clock): [] for length in LENGTHS for clock in CLOCKS
    }
    with opened(config, "shared") as shared, opened(alone, "alone") as without:
        for length, name in islice(cycle(added), options.requests * len(LENGTHS)):
            prompt = secrets.token_bytes(24)
            keys = [make_key(prompt + at.to_bytes(8, "big"), 0) for at in range(length)]
            base_s, base_thread_s = look_up(without, keys, CLOCKS[name])
            wait_s, thread_s = look_up(shared, keys, CLOCKS[name])
            waits[length].append(wait_s - base_s)
            added[length, name].append(thread_s - base_thread_s)
    for length in LENGTHS:
        sys.stdout.write(f"{length:5d} chunks:")
        report("wait", waits[length], "ms")
        for clock in CLOCKS:
            report(clock, added[length, clock], "us")
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
