"""The scheduler side's state of each request, such as the keys of its chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count, islice
from typing import Any

from kvtier.connector.groups import GroupLayout
from kvtier.connector.protocols import EngineRequest, RequestContext
from kvtier.errors import UnsupportedError
from kvtier.keys import ChunkKey, make_key
from kvtier.manager import Prompt
from kvtier.types import JobId

__all__ = ["OfferQueue", "TrackedRequest", "chunk_positions"]

NameChunk = Callable[[ChunkKey], ChunkKey]
"""Converts the engine's key of a chunk to kvtier's key."""


class TrackedRequest:
    """One request from its arrival until its last job is acknowledged.

    The cache sees this object as a :class:`~kvtier.connector.protocols.RequestContext`.

    Attributes:
        request: The engine's own object.
        layouts: The KV cache groups.
        keys: Per group, the keys of the request's complete chunks so far.
        offered_tokens: Per group, the number of leading tokens offered for storing.
        next_offer_tokens: Number of computed tokens at which to look for the next chunk to
            store; 0 to look at the next step, infinity for never.
        local_tokens: Number of tokens in the engine's own cache at the last lookup.
        jobs: Jobs in flight: either one load, or stores.
        has_blocks: Whether the request was scheduled and has not lost its blocks since then.
        may_store: Returns whether the keys still describe the request's KV; None if they
            always do.
        store_limit: Largest number of leading tokens to store; None for no limit.
        load_sources: Number of tokens that each tier provided to the last load, by tier index.
    """

    __slots__ = (
        "_known_hashes",
        "_last_hash",
        "_load_limit",
        "_name_chunk",
        "has_blocks",
        "jobs",
        "keys",
        "layouts",
        "load_sources",
        "local_tokens",
        "may_store",
        "next_offer_tokens",
        "offered_tokens",
        "request",
        "store_limit",
    )

    def __init__(
        self,
        request: EngineRequest,
        layouts: Sequence[GroupLayout],
        *,
        name_chunk: NameChunk | None = None,
        may_store: Callable[[], bool] | None = None,
    ) -> None:
        params = request.kv_transfer_params or {}
        self.request = request
        self.layouts = layouts
        self.keys: list[list[ChunkKey]] = [[] for _ in layouts]
        self.offered_tokens = [0] * len(layouts)
        self.next_offer_tokens: float = 0
        self.local_tokens = 0
        self.jobs: set[JobId] = set()
        self.has_blocks = False
        self.store_limit = _tokens(params, "max_offload_tokens")
        self.load_sources: Mapping[int, int] = {}
        self.may_store = may_store
        self._load_limit = _tokens(params, "max_load_tokens")
        self._name_chunk = name_chunk
        self._known_hashes = 0
        self._last_hash = b""

    @property
    def req_id(self) -> str:
        """The engine's id of the request."""
        return self.request.request_id

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """The client's parameters for KV transfer."""
        return self.request.kv_transfer_params

    def extend_keys(self) -> None:
        """Add the keys of the chunks that became complete since the last call."""
        hashes = self.request.block_hashes
        known, count = self._known_hashes, len(hashes)
        if known and (count < known or hashes[known - 1] != self._last_hash):
            self._forget_replaced(hashes)
        elif count == known:
            return
        self._known_hashes = count
        self._last_hash = hashes[-1] if count else b""
        for layout, keys in zip(self.layouts, self.keys, strict=True):
            step = layout.hashes_per_chunk
            new = islice(hashes, step * len(keys) + step - 1, None, step)
            named = (make_key(block_hash, layout.index) for block_hash in new)
            keys.extend(named if self._name_chunk is None else map(self._name_chunk, named))

    def offer_again(self) -> None:
        """Mark all chunks as not offered, so that the scheduler side offers them again."""
        self.offered_tokens = [0] * len(self.layouts)
        self.next_offer_tokens = 0

    def prompt(self, *, recompute_tokens: int) -> Prompt:
        """Return the request's chunk keys and the range of tokens that may be loaded.

        Args:
            recompute_tokens: Number of tokens at the end that the engine always computes.
        """
        limit = self.request.num_tokens - recompute_tokens
        if self._load_limit is not None:
            limit = min(limit, self.local_tokens + self._load_limit)
        return Prompt(self.keys, self.local_tokens, limit)

    def _forget_replaced(self, hashes: Sequence[bytes]) -> None:
        """Drop the keys of tokens that the engine has replaced.

        This happens when a client continues a prompt that it sends in parts.
        """
        for group, (layout, keys) in enumerate(zip(self.layouts, self.keys, strict=True)):
            step = layout.hashes_per_chunk
            del keys[len(hashes) // step :]
            # A hash covers all tokens before it, so the keys before a valid one are valid.
            while keys and keys[-1] != self._name(hashes[len(keys) * step - 1], layout):
                keys.pop()
            valid = len(keys) * layout.tokens_per_chunk
            self.offered_tokens[group] = min(self.offered_tokens[group], valid)

    def _name(self, block_hash: bytes, layout: GroupLayout) -> ChunkKey:
        key = make_key(block_hash, layout.index)
        return key if self._name_chunk is None else self._name_chunk(key)


class OfferQueue:
    """Requests, ordered by the earliest step that may complete their next chunk.

    The clock of the queue counts tokens. A step advances the clock by the largest number of
    tokens that the step computes for one request. So a request that lacks n tokens for its next
    chunk is due after n ticks at the earliest. No earlier step checks this request.
    """

    def __init__(self) -> None:
        self._now = 0
        self._heap: list[tuple[float, int, str]] = []
        self._due: dict[str, tuple[float, int, TrackedRequest]] = {}
        """Time, serial number and request, by id; a heap entry with another number is stale."""
        self._serials = count()

    def add(self, tracked: TrackedRequest, wait_tokens: float = 0) -> None:
        """Queue a request; the request becomes due after ``wait_tokens`` more tokens."""
        due_at, serial = self._now + wait_tokens, next(self._serials)
        self._due[tracked.req_id] = (due_at, serial, tracked)
        heappush(self._heap, (due_at, serial, tracked.req_id))

    def remove(self, tracked: TrackedRequest) -> None:
        """Remove a request from the queue."""
        self._due.pop(tracked.req_id, None)

    def pass_token(self) -> bool:
        """Advance the clock by one token; return False instead if a request would be due."""
        if self._heap and self._heap[0][0] <= self._now + 1:
            return False
        self._now += 1
        return True

    def take_due(self, scheduled_tokens: Mapping[str, int]) -> list[TrackedRequest]:
        """Remove and return the due requests, in the order of ``scheduled_tokens``.

        Args:
            scheduled_tokens: Tokens that the step computes, by request.
        """
        self._now += max(scheduled_tokens.values(), default=0)
        due: list[TrackedRequest] = []
        while self._heap and self._heap[0][0] <= self._now:
            _, serial, req_id = heappop(self._heap)
            entry = self._due.get(req_id)
            if entry is not None and entry[1] == serial:
                due.append(entry[2])
                del self._due[req_id]
        if len(due) > 1:  # which chunks find room must not depend on when requests were added
            order = {req_id: place for place, req_id in enumerate(scheduled_tokens)}
            due.sort(key=lambda tracked: order.get(tracked.req_id, len(order)))
        return due


def chunk_positions(context: RequestContext) -> Mapping[ChunkKey, int]:
    """Return the end in tokens of each chunk of a tracked request, by the chunk's key.

    The chunks are in order, group by group and from root to leaf.

    Raises:
        UnsupportedError: ``context`` is not a :class:`TrackedRequest`.
    """
    if not isinstance(context, TrackedRequest):
        raise UnsupportedError(f"{type(context).__name__} has no list of its chunks")
    return {
        key: (number + 1) * layout.tokens_per_chunk
        for layout, keys in zip(context.layouts, context.keys, strict=True)
        for number, key in enumerate(keys)
    }


def _tokens(params: Mapping[str, Any], name: str) -> int | None:
    """Return the token limit ``name`` in ``params``; None if it is missing or invalid."""
    limit = params.get(name)
    return limit if type(limit) is int and limit >= 0 else None
