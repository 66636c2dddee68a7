"""Writes a trace in a format that :func:`read_trace` reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtier.sim.traces._flat import RECORD
from kvtier.sim.traces._trace import Trace

__all__ = ["WRITERS", "write_trace"]


def write_trace(trace: Trace, path: Path, *, format_name: str) -> None:
    """Write ``trace`` to ``path``, with chunks numbered in order of first appearance.

    The flat formats among :data:`WRITERS` lose the boundaries between requests.
    """
    path.write_bytes(WRITERS[format_name](trace))


def _mooncake(trace: Trace) -> bytes:
    lines = []
    sessions = trace.session_names()
    for number, chain in enumerate(trace.chains()):
        record: dict[str, Any] = {
            "timestamp": round(float(trace.timestamps_s[number]) * 1e3, 3),
            "input_length": int(trace.input_tokens[number]),
            "output_length": int(trace.output_tokens[number]),
            "hash_ids": chain,
            "block_tokens": trace.chunk_tokens,
        }
        if sessions[number]:
            record["session_id"] = sessions[number]
        lines.append(json.dumps(record))
    return ("\n".join(lines) + "\n").encode()


def _keys(trace: Trace) -> bytes:
    return ("\n".join(map(str, trace.ids.tolist())) + "\n").encode()


def _oracle(trace: Trace) -> bytes:
    records = np.empty(trace.refs, dtype=RECORD)
    per_request = np.diff(trace.offsets)
    records["time_s"] = np.repeat(trace.timestamps_s, per_request).astype(np.uint32)
    records["id"] = trace.ids
    records["nbytes"] = 1
    following = trace.next_uses()
    records["next"] = np.where(following == trace.refs, -1, following)
    return records.tobytes()


WRITERS: Final[Mapping[str, Callable[[Trace], bytes]]] = {
    "mooncake": _mooncake,
    "keys": _keys,
    "oracle": _oracle,
}
"""Functions that encode a trace, by format."""
