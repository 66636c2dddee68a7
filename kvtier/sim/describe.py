"""What a trace holds, before any policy is chosen."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.sim.traces import Trace

__all__ = ["describe"]


def describe(trace: Trace) -> dict[str, Any]:
    """Return the facts of ``trace`` as plain values.

    ``reuse_*_s`` are the times between two references to the same chunk. The
    ``infinite_*_ratio`` are what a cache that never evicts would hit: no policy hits more.
    """
    following = trace.next_uses()
    again = following < trace.refs
    arrivals = np.repeat(trace.timestamps_s, np.diff(trace.offsets))
    gaps = arrivals[following[again]] - arrivals[again]
    tokens = int(trace.input_tokens.sum())
    return {
        "trace": trace.name,
        "format": trace.format,
        "sha256": trace.sha256,
        "requests": trace.requests,
        "refs": trace.refs,
        "distinct": trace.distinct,
        "chunk_tokens": trace.chunk_tokens,
        "duration_s": round(trace.duration_s, 3),
        "input_tokens": tokens,
        "output_tokens": int(trace.output_tokens.sum()),
        "median_input_tokens": int(np.median(trace.input_tokens)),
        "median_chunks": int(np.median(np.diff(trace.offsets))),
        "infinite_block_hit_ratio": round(1 - trace.distinct / trace.refs, 6),
        "infinite_prefix_hit_ratio": round(_infinite_prefix(trace) / max(tokens, 1), 6),
        "reuse_median_s": _quantile(gaps, 0.5),
        "reuse_p90_s": _quantile(gaps, 0.9),
    }


def _infinite_prefix(trace: Trace) -> int:
    """Return the prompt tokens whose whole prefix was seen in an earlier request."""
    seen = bytearray(trace.distinct)
    saved = 0
    for chain, length in zip(trace.chains(), trace.input_tokens.tolist(), strict=True):
        lead = 0
        for chunk in chain:
            if not seen[chunk]:
                break
            lead += 1
        saved += min(lead * trace.chunk_tokens, length)
        for chunk in chain[lead:]:
            seen[chunk] = 1
    return saved


def _quantile(values: np.ndarray[Any, np.dtype[np.float64]], share: float) -> float | None:
    return round(float(np.quantile(values, share)), 3) if len(values) else None
