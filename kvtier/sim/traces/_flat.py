"""Reads traces without requests: one key per line, or libCacheSim's ``oracleGeneral``.

Every reference becomes a request with one chunk, so the prefix hit ratio equals the block
hit ratio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from kvtier.sim.traces._source import TO_UTF8, Source, TraceBuilder
from kvtier.sim.traces._trace import Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RECORD_NBYTES", "read_keys", "read_oracle"]

RECORD: Final = np.dtype([("time_s", "<u4"), ("id", "<u8"), ("nbytes", "<u4"), ("next", "<i8")])
"""The layout of an ``oracleGeneral`` record."""
RECORD_NBYTES: Final = RECORD.itemsize
"""Size in bytes of an ``oracleGeneral`` record."""
_LONGEST_KEY: Final = 4096


def read_keys(source: Source, tokens: int) -> Trace:
    """Read a file with one key per line; each request has one chunk of ``tokens`` tokens."""
    keys = _decode(source).rstrip().split("\n")
    builder = TraceBuilder(chunk_tokens=tokens)
    for number, key in enumerate(keys, start=1):
        name = key.strip()
        if not name:
            raise source.error(number, "an empty line between keys", "remove it")
        if len(name) > _LONGEST_KEY:
            problem = f"a line of {len(name):,} characters, too long for a key"
            remedy = f"write one key of at most {_LONGEST_KEY:,} characters per line"
            raise source.error(number, problem, remedy)
        builder.add((name,), timestamp_s=float(number - 1), input_tokens=tokens)
    return builder.build(source, "keys")


def _decode(source: Source) -> str:
    try:
        return source.content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = source.content.count(b"\n", 0, error.start) + 1
        remedy = f"{TO_UTF8}, or name its format with --format"
        raise source.error(line, "not UTF-8 text", remedy) from error


def read_oracle(source: Source, tokens: int) -> Trace:
    """Read 24-byte little-endian records: u32 time, u64 id, u32 size, i64 next access."""
    excess = len(source.content) % RECORD_NBYTES
    if excess:
        whole = len(source.content) // RECORD_NBYTES
        problem = f"{excess} bytes after {whole} records of {RECORD_NBYTES} bytes"
        remedy = "the file is cut off, or no oracleGeneral trace: see --format"
        raise source.error(whole + 1, problem, remedy)
    records: NDArray[np.void] = np.frombuffer(source.content, dtype=RECORD)
    times = records["time_s"].astype(np.float64)
    back = np.flatnonzero(np.diff(times) < 0)
    if len(back):
        at = int(back[0])
        problem = f"time {times[at + 1]:.0f} after {times[at]:.0f}"
        remedy = "sort the records by time, or the file is no oracleGeneral trace: see --format"
        raise source.error(at + 2, problem, remedy)
    _, first, inverse = np.unique(records["id"], return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    refs = len(records)
    return Trace(
        name=source.name,
        format="oracle",
        sha256=source.sha256,
        ids=rank[inverse],
        offsets=np.arange(refs + 1, dtype=np.int64),
        timestamps_s=times - times[0],
        input_tokens=np.full(refs, tokens, dtype=np.int64),
        output_tokens=np.zeros(refs, dtype=np.int64),
        chunk_tokens=tokens,
        distinct=len(first),
    )
