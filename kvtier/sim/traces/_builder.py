"""Collects requests into a :class:`Trace`, renumbering chunk ids as they appear."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable

import numpy as np

from kvtier.sim.traces._source import Source
from kvtier.sim.traces._trace import Trace

__all__ = ["TraceBuilder"]


class TraceBuilder:
    """A trace under construction; about 8 bytes per reference and a dict entry per chunk.

    Args:
        chunk_tokens: Tokens of one whole chunk.
    """

    def __init__(self, *, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self._numbers: dict[Hashable, int] = {}
        self._ids = array("q")
        self._offsets = array("q", [0])
        self._timestamps = array("d")
        self._inputs = array("q")
        self._outputs = array("q")
        self._sessions: list[str] = []

    def add(
        self,
        ids: Iterable[Hashable],
        *,
        timestamp_s: float,
        input_tokens: int,
        output_tokens: int = 0,
        session: str = "",
    ) -> None:
        """Append one request, its ids root to leaf."""
        numbers = self._numbers
        self._ids.extend([numbers.setdefault(key, len(numbers)) for key in ids])
        self._offsets.append(len(self._ids))
        self._timestamps.append(timestamp_s)
        self._inputs.append(input_tokens)
        self._outputs.append(output_tokens)
        self._sessions.append(session)

    def build(self, source: Source, format_name: str) -> Trace:
        """Return the trace.

        Raises:
            TraceError: No request refers to any chunk.
        """
        if not self._ids:
            remedy = "check hash_ids: requests shorter than one chunk refer to none"
            raise source.error(0, "no request refers to any chunk", remedy)
        return self.finish(name=source.name, format_name=format_name, sha256=source.sha256)

    def finish(self, *, name: str, format_name: str, sha256: str) -> Trace:
        """Return the trace under a name of its own; for traces that are no file."""
        timestamps = np.array(self._timestamps, dtype=np.float64)
        return Trace(
            name=name,
            format=format_name,
            sha256=sha256,
            ids=np.array(self._ids, dtype=np.int64),
            offsets=np.array(self._offsets, dtype=np.int64),
            timestamps_s=timestamps - timestamps.min(),
            input_tokens=np.array(self._inputs, dtype=np.int64),
            output_tokens=np.array(self._outputs, dtype=np.int64),
            chunk_tokens=self.chunk_tokens,
            distinct=len(self._numbers),
            sessions=tuple(self._sessions) if any(self._sessions) else (),
        )
