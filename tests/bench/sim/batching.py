"""The default policy beside LRU in an engine that batches, with the manager of a live engine.

Prompts are stored in parts, as chunked prefill computes them, and by turns with other prompts.
Chunks that requests load are pinned. So the order of events is that of a live engine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from kvtier.config import parse_config
from kvtier.sim.cache import StepModel, default_time_model, simulate_cache
from kvtier.sim.traces import Trace, generate

__all__ = ["Compared", "compared", "lead_over_lru"]

CHUNK_NBYTES = 1 << 20
SIZES = (0.02, 0.05, 0.1, 0.2)


class Compared(NamedTuple):
    """Prefix hit ratios at one size, in percent."""

    traffic: str
    size: float
    lru: float
    lhd: float


def compared(more: Trace | None = None) -> Iterator[Compared]:
    """Compare generated traffic, and the trace ``more``, in RAM of several sizes."""
    traces = {
        "chats": generate("chat", sessions=600, per_s=1.0, chunk_tokens=256, seed=1),
        "short chats": generate("chat", sessions=100, per_s=2.0, chunk_tokens=64, seed=7),
        "agents": generate("agents", sessions=30, per_s=0.05, chunk_tokens=256, seed=1),
        "many agents": generate("agents", sessions=100, per_s=0.2, chunk_tokens=512, seed=3),
        "shared prompts": generate(
            "shared", sessions=3000, per_s=4.0, chunk_tokens=256, seed=1
        ),
    }
    if more is not None:
        traces[more.name] = more
    for traffic, trace in traces.items():
        for size in SIZES:
            ratio = functools.partial(_hit_ratio, trace, size)
            yield Compared(traffic, size, 100 * ratio("lru"), 100 * ratio("lhd"))


def lead_over_lru(trace: Trace, size: float) -> float:
    """Return by how much the prefix hit ratio of ``lhd`` is above that of LRU."""
    return _hit_ratio(trace, size, "lhd") - _hit_ratio(trace, size, "lru")


def _hit_ratio(trace: Trace, size: float, policy: str) -> float:
    nbytes = max(2, int(size * trace.distinct + 0.5)) * CHUNK_NBYTES
    text = (
        f"tiers: [{{kind: ram, capacity: {nbytes}B, eviction: {policy}}}]\n"
        "placement: {load_if: always}\n"
    )
    config = parse_config(text, source="bench")
    speeds = default_time_model(config, trace)
    model = StepModel(
        prefill_tokens_per_s=speeds.prefill_tokens_per_s,
        concurrency=32,
        speeds=speeds.speeds,
        step_tokens=2048,
    )
    return simulate_cache(trace, config, chunk_bytes=CHUNK_NBYTES, model=model).prefix_hit_ratio
