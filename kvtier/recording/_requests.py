"""What each request asked for, in Mooncake's format.

A line is written when its request is over, for only then is the length of the answer known;
but a trace is read in the order of arrival. So a request that ends early waits here for those
that came before it, as long as there are not too many that wait.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    arrival_s: float
    session: str
    prompt: Sequence[ChunkKey] = ()
    record: RequestRecord | None = None
    over: bool = False


class RequestLog:
    """Turns what the engine says about requests into records, in order of arrival.

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
        self._open: dict[str, _Open] = {}

    def arrived(self, req_id: str, now: float, session: str = "") -> None:
        """Note that a request of ``session`` came, ``now`` in seconds on a monotonic clock."""
        if self._begun_s is None:
            self._begun_s = now
        self._open.setdefault(req_id, _Open(now - self._begun_s, session))

    def started(self, req_id: str, prompt: Sequence[ChunkKey]) -> None:
        """Note a request's chunks before it generates any."""
        request = self._open.get(req_id)
        if request is not None and not request.over:
            request.prompt = tuple(prompt)

    def ended(self, req_id: str, keys: Sequence[ChunkKey]) -> None:
        """Note that a request is over.

        Args:
            req_id: The request.
            keys: All its whole chunks, those of the answer included.
        """
        request = self._open.get(req_id)
        if request is None or request.over:
            return
        request.over = True
        # One that ended before it was scheduled generated nothing.
        prompt = request.prompt or tuple(keys)
        if prompt:
            request.record = RequestRecord(
                request.arrival_s,
                prompt,
                len(keys) - len(prompt),
                self._chunk_tokens,
                request.session,
            )
        self._release()

    def close(self) -> None:
        """Emit the requests that are over, whoever came before them."""
        for req_id in [name for name, request in self._open.items() if request.over]:
            self._leave(req_id)

    def _release(self) -> None:
        while self._open:
            req_id, request = next(iter(self._open.items()))
            if not request.over:
                break
            self._leave(req_id)
        if len(self._open) > self._most_held:
            self.close()

    def _leave(self, req_id: str) -> None:
        record = self._open.pop(req_id).record
        if record is not None:
            self._emit(record)
