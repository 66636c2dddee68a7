"""A trace in memory: the requests, their chunks and their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import KvtierError
from kvtier.printable import printable

__all__ = ["IdArray", "Trace", "TraceError", "describe"]

IdArray: TypeAlias = NDArray[np.int64]


class TraceError(KvtierError):
    """A trace cannot be read.

    Attributes:
        line: Number of the line (or binary record) with the problem, from 1; 0 for the whole
            file.
    """

    def __init__(self, file: str, line: int, problem: str, remedy: str) -> None:
        where = f"{printable(file)}:{line}" if line else printable(file)
        super().__init__(f"{where}: {problem}; {remedy}")
        self.file = file
        self.line = line
        self.problem = problem
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. Chunks are numbered in order of first appearance.

    So a chunk's number is an index into lists of length :attr:`distinct`. The trace does not
    keep the file's ids.

    Attributes:
        name: The file's name without its directory and suffixes.
        format: The name of the file's format.
        sha256: SHA-256 of the file on disk.
        ids: Chunk number of every reference, shape (references,).
        offsets: Index in ``ids`` of each request's first reference, shape (requests + 1,).
        timestamps_s: Arrival of each request in seconds since the first, shape (requests,).
        input_tokens: Number of prompt tokens of each request, shape (requests,).
        output_tokens: Number of generated tokens of each request, shape (requests,); 0 if
            unknown.
        chunk_tokens: Number of tokens of one whole chunk.
        distinct: Number of distinct chunks.
        sessions: One session per request; an empty string if unknown. The sequence is empty if
            all sessions are unknown.
        assumed: Assumptions of the reader: the file's format, the unit of its timestamps, and
            the number of tokens per chunk.
        warnings: Contradictions in the file, and the reader's corrections.
    """

    name: str
    format: str
    sha256: str
    ids: IdArray
    offsets: IdArray
    timestamps_s: NDArray[np.float64]
    input_tokens: IdArray
    output_tokens: IdArray
    chunk_tokens: int
    distinct: int
    sessions: Sequence[str] = ()
    assumed: Sequence[str] = ()
    warnings: Sequence[str] = ()

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.offsets) - 1

    @property
    def refs(self) -> int:
        """Number of chunk references."""
        return len(self.ids)

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.timestamps_s.max() - self.timestamps_s.min())

    def session_names(self) -> Sequence[str]:
        """Return one session per request, in order; an unknown session is an empty string."""
        return self.sessions or ("",) * self.requests

    def reading(self) -> dict[str, list[str]]:
        """Return the trace's ``assumed`` and ``warnings`` as plain lists, for JSON."""
        return {"assumed": list(self.assumed), "warnings": list(self.warnings)}

    def chains(self) -> list[list[int]]:
        """Return every request's chunk numbers, root to leaf.

        The result has plain lists, because a Python loop over an array creates an object per
        element.
        """
        numbers = self.ids.tolist()
        return [numbers[start:end] for start, end in pairwise(self.offsets.tolist())]

    def next_uses(self, *, backwards: bool = False) -> IdArray:
        """Return for each access the position of the next access to the same chunk.

        Args:
            backwards: Whether each request's chunks are accessed leaf to root.

        Returns:
            An array of shape (references,), in order of access. If there is no next access, the
            position is ``refs``, which exceeds every valid position.
        """
        ids = self.ids
        if backwards:
            starts = np.repeat(self.offsets[:-1], np.diff(self.offsets))
            ends = np.repeat(self.offsets[1:], np.diff(self.offsets))
            ids = ids[starts + ends - 1 - np.arange(self.refs)]
        following = np.full(self.refs, self.refs, dtype=np.int64)
        order = np.argsort(ids, kind="stable")
        same = ids[order[1:]] == ids[order[:-1]]
        following[order[:-1][same]] = order[1:][same]
        return following


def describe(trace: Trace) -> dict[str, Any]:
    """Return figures of ``trace`` as plain values.

    ``reuse_*_s`` are the times between two references to the same chunk. The
    ``infinite_*_ratio`` are the hit ratios of a cache that never evicts. No policy can have
    higher ratios.
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
    """Return the number of prompt tokens that a cache without evictions would load."""
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
