"""Writes a trace in Mooncake's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvtier.sim.traces._trace import Trace

__all__ = ["write_trace"]


def write_trace(trace: Trace, path: Path) -> None:
    """Write ``trace`` to ``path``, with chunks numbered in order of first appearance."""
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
    path.write_bytes(("\n".join(lines) + "\n").encode())
