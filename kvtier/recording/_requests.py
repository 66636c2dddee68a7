"""What each request asked for, in Mooncake's format.

A line is written when its request is over, for only then is the length of the answer known;
but a trace is read in the order of arrival. So a request that ends early waits here for those
that came before it, as long as there are not too many that wait.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from kvtier.keys import ChunkKey

__all__ = ["RequestLog", "RequestRecord"]

_MOST_HELD: Final = 4096


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request.

    Attributes:
        arrival_s: When it came, in seconds from the start of the recording.
        prompt: The whole chunks of its prompt, root to leaf.
        answer_chunks: Whole chunks that its answer added.
        chunk_tokens: Tokens of a chunk.
        session: What it belongs to, if whoever sent it said so.
    """

    arrival_s: float
    prompt: Sequence[ChunkKey]
    answer_chunks: int
    chunk_tokens: int
    session: str = ""

    def line(self) -> bytes:
        """Return the record as a line of JSON.

        Ids are 63 bits of the engine's block hash: enough to tell chunks apart, and numbers,
        as readers of the format expect. Lengths are those of whole chunks.
        """
        record: dict[str, object] = {
            "timestamp": round(self.arrival_s * 1e3, 3),
            "input_length": len(self.prompt) * self.chunk_tokens,
            "output_length": self.answer_chunks * self.chunk_tokens,
            "hash_ids": [int.from_bytes(key[:8], "big") >> 1 for key in self.prompt],
            "block_tokens": self.chunk_tokens,
        }
        if self.session:
            record["session_id"] = self.session
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"


@dataclass(slots=True)
class _Open:
    number: int
    arrival_s: float
    session: str
    prompt: Sequence[ChunkKey] = ()


class RequestLog:
    """Turns what the engine says about requests into records, in order of arrival.

    Where more than ``most_held`` are remembered, records go out before those of requests that
    came earlier and are not over: each time the earliest there is, so that only lines which are
    thousands of requests apart change places.

    Args:
        emit: Called with each record.
        chunk_tokens: Tokens of a chunk.
        most_held: Requests that may be remembered before those that are over stop waiting for
            an earlier one.
    """

    def __init__(
        self,
        emit: Callable[[RequestRecord], None],
        *,
        chunk_tokens: int,
        most_held: int = _MOST_HELD,
    ) -> None:
        self._emit = emit
        self._chunk_tokens = chunk_tokens
        self._most_held = most_held
        self._begun_s: float | None = None
        self._arrivals = 0
        # Its first item is asked for at every end: a dict would step over all that have left.
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._over: list[tuple[int, RequestRecord]] = []
        """A heap: the earliest to have come is first."""

    def arrived(self, req_id: str, now: float, session: str = "") -> None:
        """Note that a request of ``session`` came, ``now`` in seconds on a monotonic clock.

        One that had its id, and of which nobody said that it is over, is forgotten.
        """
        if self._begun_s is None:
            self._begun_s = now
        self._arrivals += 1
        self._open.pop(req_id, None)
        self._open[req_id] = _Open(self._arrivals, now - self._begun_s, session)

    def started(self, req_id: str, prompt: Sequence[ChunkKey]) -> None:
        """Note a request's chunks before it generates any."""
        request = self._open.get(req_id)
        if request is not None:
            request.prompt = tuple(prompt)

    def ended(self, req_id: str, keys: Sequence[ChunkKey]) -> None:
        """Note that a request is over.

        Args:
            req_id: The request.
            keys: All its whole chunks, those of the answer included.
        """
        request = self._open.pop(req_id, None)
        if request is None:
            return
        # One that ended before it was scheduled generated nothing.
        prompt = request.prompt or tuple(keys)
        if prompt:
            record = RequestRecord(
                request.arrival_s,
                prompt,
                len(keys) - len(prompt),
                self._chunk_tokens,
                request.session,
            )
            heappush(self._over, (request.number, record))
        self._release()

    def close(self) -> None:
        """Emit the requests that are over, whoever came before them."""
        while self._over:
            self._emit_earliest()

    def _release(self) -> None:
        """Emit what nobody is before any more, and what there is no room to hold back."""
        earliest_open = next(iter(self._open.values()), None)
        while self._over and (
            earliest_open is None
            or self._over[0][0] < earliest_open.number
            or len(self._open) + len(self._over) > self._most_held
        ):
            self._emit_earliest()

    def _emit_earliest(self) -> None:
        _, record = heappop(self._over)
        self._emit(record)
