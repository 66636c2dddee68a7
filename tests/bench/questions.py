"""``python -m tests.bench.questions FILE.yaml``: what a request pays that nobody has stored.

Requests of many lengths are looked up one after the other, as vLLM's scheduler does it: a
lookup in each step until there is an answer. They find nothing, neither in the local tiers nor
in the shared tier, which is the last in FILE.yaml. The same requests are looked up without the
shared tier, in turn with the others, so that the difference is what the shared tier adds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Final

from kvtier.config import KvtierConfig, load_config
from kvtier.connector.service import CacheService
from kvtier.connector.storage import open_storage
from kvtier.keys import ChunkKey, make_key
from kvtier.manager.hits import GroupReach, Prompt
from kvtier.memory import HostRegion, RegionGeometry
from kvtier.types import LayoutFingerprint

CHUNK_NBYTES: Final = 2 << 20
LENGTHS: Final = (64, 256, 1024, 4096)
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


def look_up(service: CacheService, keys: Sequence[ChunkKey]) -> tuple[float, float]:
    """Look up a new request until it is answered.

    Returns:
        Seconds until the answer, and seconds in calls of the scheduler's thread.
    """
    req_id = secrets.token_hex(4)
    prompt = Prompt([keys], 0, len(keys))
    begin_s = time.perf_counter()
    thread_s = 0.0
    while True:
        call_s = time.perf_counter()
        tokens = service.lookup(req_id, prompt)
        thread_s += time.perf_counter() - call_s
        if tokens is not None:
            break
        service.end_step(started=(), preempted=())
        time.sleep(STEP_S)
    waited_s = time.perf_counter() - begin_s
    if tokens:
        raise RuntimeError(f"a new prompt hits {tokens} tokens")
    return waited_s, thread_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.questions")
    parser.add_argument("file", type=Path, help="configuration; its last tier is shared")
    parser.add_argument("--requests", type=int, default=200, help="requests of each kind")
    options = parser.parse_args()
    config = load_config(options.file)
    if not config.tiers[-1].is_shared:
        sys.exit(f"{options.file}: the last tier is not shared")
    alone = config.model_copy(update={"tiers": config.tiers[:-1]})
    waits: list[float] = []
    added: list[float] = []
    with opened(config, "shared") as shared, opened(alone, "alone") as without:
        for length in islice(cycle(LENGTHS), options.requests):
            prompt = secrets.token_bytes(24)
            keys = [make_key(prompt + at.to_bytes(8, "big"), 0) for at in range(length)]
            without_s, base_s = look_up(without, keys)
            waited_s, thread_s = look_up(shared, keys)
            waits.append(waited_s - without_s)
            added.append(thread_s - base_s)
    for what, values, unit in (("waits", waits, 1e3), ("scheduler's thread", added, 1e6)):
        ordered = sorted(value * unit for value in values)
        sys.stdout.write(
            f"{what:20s} median {statistics.median(ordered):.2f}, "
            f"p90 {ordered[int(0.9 * len(ordered))]:.2f}, most {ordered[-1]:.2f} "
            f"{'ms' if unit == 1e3 else 'us'}\n"
        )


if __name__ == "__main__":
    main()
