"""What the scheduler half remembers of a request: its chunks, its blocks, what it stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from kvtier.connector.context import RequestContext
from kvtier.connector.protocols import NULL_BLOCK, EngineRequest
from kvtier.connector.schedule.groups import GroupLayout, ceil_div
from kvtier.errors import UnsupportedError
from kvtier.keys import ChunkKey, make_key
from kvtier.types import JobId

__all__ = ["GroupTrack", "TrackedRequest", "chunk_positions"]


class GroupTrack:
    """One KV cache group of one request.

    Attributes:
        layout: The group.
        keys: Keys of its whole chunks known so far.
        block_ids: Its blocks in the engine while it is scheduled; ``NULL_BLOCK`` where it has
            none, or none any more.
        next_chunk: The first chunk not offered for storing yet.
    """

    __slots__ = ("block_ids", "keys", "layout", "next_chunk")

    def __init__(self, layout: GroupLayout) -> None:
        self.layout = layout
        self.keys: list[ChunkKey] = []
        self.block_ids: list[int] = []
        self.next_chunk = 0

    def extend_keys(self, block_hashes: Sequence[bytes]) -> None:
        """Name the chunks that ``block_hashes`` completes: by the hash of their last block."""
        step = self.layout.hashes_per_chunk
        index = self.layout.index
        new = islice(block_hashes, step * len(self.keys) + step - 1, None, step)
        self.keys.extend(make_key(block_hash, index) for block_hash in new)

    def storable_chunks(self, tokens: int) -> int:
        """Return how many leading chunks lie in the first ``tokens`` and have blocks."""
        return min(
            tokens // self.layout.tokens_per_chunk,
            len(self.block_ids) // self.layout.blocks_per_chunk,
            len(self.keys),
        )

    def blocks_of(self, chunk: int) -> list[int]:
        """Return the blocks of ``chunk``."""
        size = self.layout.blocks_per_chunk
        return self.block_ids[chunk * size : (chunk + 1) * size]

    def has_whole(self, chunk: int) -> bool:
        """Return whether no block of ``chunk`` is gone."""
        return self.layout.window_tokens is None or NULL_BLOCK not in self.blocks_of(chunk)


class TrackedRequest:
    """One request from its arrival until its last job is acknowledged.

    It is the :class:`~kvtier.connector.context.RequestContext` the cache sees.

    Attributes:
        request: The engine's own object.
        groups: One per KV cache group.
        local_tokens: Tokens the engine had in its own cache when it asked last.
        jobs: Jobs in flight: one load, or stores.
        keeps_prefix: Whether what was loaded is offered for storing all the same: another node
            decodes this request and finds its whole prefix in the store.
        load_limit: Most tokens to load, None for any.
        store_limit: Tokens after which nothing is stored, None for any.
        ended: Whether the cache was told that it finished.
    """

    __slots__ = (
        "_hashes",
        "ended",
        "groups",
        "jobs",
        "keeps_prefix",
        "load_limit",
        "local_tokens",
        "request",
        "store_limit",
    )

    def __init__(self, request: EngineRequest, layouts: Sequence[GroupLayout]) -> None:
        params = request.kv_transfer_params or {}
        self.request = request
        self.groups = tuple(GroupTrack(layout) for layout in layouts)
        self.local_tokens = 0
        self.jobs: set[JobId] = set()
        self.keeps_prefix = bool(params.get("do_remote_decode"))
        self.load_limit = _tokens(params, "max_load_tokens")
        self.store_limit = _tokens(params, "max_offload_tokens")
        self.ended = False
        self._hashes = 0

    @property
    def req_id(self) -> str:
        """The engine's name for it."""
        return self.request.request_id

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What whoever sent it asks of the KV cache."""
        return self.request.kv_transfer_params

    def extend_keys(self) -> None:
        """Name the chunks that became whole since the last call."""
        hashes = self.request.block_hashes
        if len(hashes) == self._hashes:
            return
        self._hashes = len(hashes)
        for group in self.groups:
            group.extend_keys(hashes)

    def forget_blocks(self) -> None:
        """Note that the engine took its blocks away."""
        for group in self.groups:
            group.block_ids.clear()

    def completes_a_chunk(self, tokens: int) -> bool:
        """Return whether the first ``tokens`` tokens hold a chunk not offered yet."""
        for group in self.groups:
            if (group.next_chunk + 1) * group.layout.tokens_per_chunk <= tokens:
                return True
        return False

    def skip_loaded(self, external_tokens: int) -> None:
        """Do not offer what is being loaded: it is where it would be stored."""
        end_tokens = self.local_tokens + external_tokens
        for group in self.groups:
            group.next_chunk = ceil_div(end_tokens, group.layout.tokens_per_chunk)

    def offer_anew(self) -> None:
        """Offer every chunk from the first one on, as if none had been stored."""
        for group in self.groups:
            group.next_chunk = 0

    def clear(self) -> None:
        """Let go of all that is remembered of the request's content."""
        for group in self.groups:
            group.block_ids.clear()
            group.keys.clear()


def chunk_positions(context: RequestContext) -> Mapping[ChunkKey, int]:
    """Return a tracked request's chunks, root to leaf, and the token each ends before.

    Raises:
        UnsupportedError: ``context`` is not from this scheduler half.
    """
    if not isinstance(context, TrackedRequest):
        raise UnsupportedError(f"{type(context).__name__} does not say which chunks it has")
    return {
        key: (number + 1) * group.layout.tokens_per_chunk
        for group in context.groups
        for number, key in enumerate(group.keys)
    }


def _tokens(params: Mapping[str, Any], name: str) -> int | None:
    """Return a limit a request sets; what is no count of tokens sets none."""
    limit = params.get(name)
    return limit if type(limit) is int and limit >= 0 else None
