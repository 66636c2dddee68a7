"""The requests of a trace in the form that an engine uses."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np

from kvtier.connector.hints import HINTS_KEY, MAX_SESSION_CHARS
from kvtier.sim.traces import Trace

__all__ = [
    "ReplayRequest",
    "make_requests",
    "pick_requests",
    "shorten_sessions",
    "with_chains",
]

_SEED_MASK = (1 << 62) - 1


@dataclass(slots=True, eq=False)
class ReplayRequest:
    """A request: the fields that the connector reads, and the engine's own state.

    Attributes:
        request_id: The request's position in the trace.
        arrival_s: Time of arrival, in seconds from the start.
        num_prompt_tokens: Number of tokens of the prompt.
        output_tokens: Number of tokens to generate.
        block_hashes: Hash of each block of the prompt. Equal prefixes have equal hashes.
        blocks: The allocated blocks.
        num_computed_tokens: Number of tokens with KV in ``blocks``.
        generated: Number of tokens generated so far.
        loaded_tokens: Number of tokens of the last load.
        first_token_s: Time of the first token, in seconds; negative until then.
        kv_transfer_params: The client's hints: the session, if the trace names one.
        skip_reading_prefix_cache: Whether lookups for the request must miss.
        shared_prefix_boundary: Number of leading tokens that other requests are known to share.
    """

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    output_tokens: int
    block_hashes: Sequence[bytes]
    blocks: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    generated: int = 0
    loaded_tokens: int = 0
    first_token_s: float = -1.0
    kv_transfer_params: Mapping[str, Any] | None = None
    skip_reading_prefix_cache: bool = False
    shared_prefix_boundary: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens and generated tokens."""
        return self.num_prompt_tokens + self.generated

    def is_finished(self) -> bool:
        """Return whether every token was generated."""
        return self.generated >= self.output_tokens

    def seed(self, block: int) -> int:
        """Return the seed for the bytes of the request's block number ``block``."""
        if block < len(self.block_hashes):
            return int.from_bytes(self.block_hashes[block][:8], "little") & _SEED_MASK
        return hash((self.request_id, block)) & _SEED_MASK


def pick_requests(trace: Trace, numbers: Sequence[int]) -> Trace:
    """Return ``trace`` with only the requests at the positions ``numbers``, in that order."""
    chains = trace.chains()
    picked = with_chains(trace, [chains[number] for number in numbers])
    index = list(numbers)
    return replace(
        picked,
        timestamps_s=trace.timestamps_s[index],
        input_tokens=trace.input_tokens[index],
        output_tokens=trace.output_tokens[index],
        sessions=[trace.sessions[number] for number in index] if trace.sessions else (),
        distinct=int(picked.ids.max()) + 1 if picked.refs else 0,
    )


def with_chains(trace: Trace, chains: Sequence[Sequence[int]]) -> Trace:
    """Return a copy of ``trace`` whose requests have the chunks in ``chains``."""
    return replace(
        trace,
        ids=np.array([*chain.from_iterable(chains)], np.int64),
        offsets=np.cumsum([0, *map(len, chains)]),
    )


def make_requests(trace: Trace, *, blocks_per_chunk: int) -> Iterator[ReplayRequest]:
    """Yield the requests of ``trace`` in order of arrival.

    Args:
        trace: The trace. A prompt has only whole chunks, and has no chunk twice.
        blocks_per_chunk: Number of blocks of a chunk.
    """
    numbers = trace.ids.tolist()
    arrivals = (trace.timestamps_s - trace.timestamps_s[0]).tolist()
    outputs = trace.output_tokens.tolist()
    sessions = trace.session_names()
    for number, (start, end) in enumerate(pairwise(trace.offsets.tolist())):
        yield ReplayRequest(
            request_id=str(number),
            arrival_s=arrivals[number],
            num_prompt_tokens=(end - start) * trace.chunk_tokens,
            output_tokens=max(outputs[number], 1),
            block_hashes=[
                _block_hash(chunk, block)
                for chunk in numbers[start:end]
                for block in range(blocks_per_chunk)
            ],
            kv_transfer_params=(
                {HINTS_KEY: {"session": sessions[number]}} if sessions[number] else None
            ),
        )


def shorten_sessions(trace: Trace) -> Trace:
    """Return ``trace`` with session names short enough for a request hint.

    Then the replay and the prediction use the same names.
    """
    short = (
        session
        if len(session) <= MAX_SESSION_CHARS
        else hashlib.blake2b(session.encode(), digest_size=32).hexdigest()
        for session in trace.sessions
    )
    return replace(trace, sessions=tuple(short))


def _block_hash(chunk: int, block: int) -> bytes:
    # A trace's chunk number identifies the whole prefix, like an engine's block hash.
    return hashlib.blake2b(b"%d.%d" % (chunk, block), digest_size=32).digest()
