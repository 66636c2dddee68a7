"""The records of requests, in order of arrival and in Mooncake's format.

A record is complete only when its request ends, because the answer's length is unknown before.
Records are written in order of arrival. So the record of a request that ends early waits for
the records of earlier arrivals, while the buffer has room.
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

_MAX_HELD: Final = 4096


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The record of one request.

    Attributes:
        arrival_s: Time of arrival, in seconds from the start of the recording.
        prompt: Keys of the whole chunks of the prompt, in order.
        answer_chunks: Number of further whole chunks that the answer completed.
        chunk_tokens: Number of tokens of a chunk.
        session: The request's session; an empty string if unknown.
    """

    arrival_s: float
    prompt: Sequence[ChunkKey]
    answer_chunks: int
    chunk_tokens: int
    session: str = ""

    def line(self) -> bytes:
        """Return the record as a line of JSON.

        The id of a chunk is the number in the first 63 bits of the engine's block hash. The
        format requires numbers, and 63 bits identify a chunk. Lengths count the tokens of
        whole chunks.
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
    """Converts events of requests to records, in order of arrival.

    A finished request waits in a buffer until all earlier requests are finished. If the buffer
    is full, the earliest finished request is emitted at once. So a record is out of order
    only if thousands of later requests overtake an unfinished request.

    Args:
        emit: Called with each record.
        chunk_tokens: Number of tokens of a chunk.
        max_held: Largest number of requests, finished or not, in the buffer.
    """

    def __init__(
        self,
        emit: Callable[[RequestRecord], None],
        *,
        chunk_tokens: int,
        max_held: int = _MAX_HELD,
    ) -> None:
        self._emit = emit
        self._chunk_tokens = chunk_tokens
        self._max_held = max_held
        self._begun_s: float | None = None
        self._arrivals = 0
        # Every end reads the first item; in a dict that read would scan removed items.
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._over: list[tuple[int, RequestRecord]] = []
        """Records of finished requests, as a heap by order of arrival."""

    def arrived(self, req_id: str, now: float, session: str = "") -> None:
        """Record the arrival of a request; ``now`` is in seconds on a monotonic clock.

        An unfinished request with the same id is forgotten.
        """
        if self._begun_s is None:
            self._begun_s = now
        self._arrivals += 1
        self._open.pop(req_id, None)
        self._open[req_id] = _Open(self._arrivals, now - self._begun_s, session)

    def started(self, req_id: str, prompt: Sequence[ChunkKey]) -> None:
        """Record the chunks of a request's prompt."""
        request = self._open.get(req_id)
        if request is not None:
            request.prompt = tuple(prompt)

    def ended(self, req_id: str, keys: Sequence[ChunkKey]) -> None:
        """Record the end of a request.

        Args:
            req_id: The request.
            keys: Keys of all whole chunks of the request, including chunks of the answer.
        """
        request = self._open.pop(req_id, None)
        if request is None:
            return
        # A request that ended before it was scheduled generated nothing.
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
        """Emit all finished requests."""
        while self._over:
            self._emit_earliest()

    def _release(self) -> None:
        """Emit the finished requests that arrived before all unfinished requests.

        If the buffer has too many requests, also emit the next finished requests.
        """
        earliest_open = next(iter(self._open.values()), None)
        while self._over and (
            earliest_open is None
            or self._over[0][0] < earliest_open.number
            or len(self._open) + len(self._over) > self._max_held
        ):
            self._emit_earliest()

    def _emit_earliest(self) -> None:
        _, record = heappop(self._over)
        self._emit(record)
