"""Decides which chunks of a request to offer for storing, and finds their blocks.

A chunk is offered once, in the step that computes its last token; the worker copies it after
that step. A chunk is stored whole or not at all.

Groups of full attention offer every chunk. In a group with a window, a later hit uses only the
last chunks before the hit's end. These chunks are offered when they are computed, because the
window may pass their blocks before the request reaches the hit's end. Hits can end at multiples
of the engine's retention interval, at the end of the prompt, and at the end of a prefix that is
shared with another request. If generated tokens are stored, hits can also end at every chunk
boundary after the prompt.

When a chunk is offered, its blocks are read from the engine's block table. Blocks that a window
has passed are null blocks there, and chunks with null blocks are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile

from kvtier.connector.groups import GroupLayout, SchedulerOptions
from kvtier.connector.metadata import BlockSpec
from kvtier.connector.protocols import AllocatedBlocks, BoundaryState, EngineRequest
from kvtier.connector.requests import TrackedRequest
from kvtier.keys import ChunkKey
from kvtier.manager import Reach

__all__ = ["Offer", "StoreRules", "computed_tokens"]


@dataclass(slots=True)
class Offer:
    """Chunks of one request to offer for storing.

    Attributes:
        keys: Keys of the chunks, group after group.
        blocks: The engine's blocks of each chunk.
        places: For each chunk, the number of its group and the index of its first block in the
            request.
        groups: Number of groups.
        ends: Per group, the number of leading tokens offered, including this offer.
    """

    keys: list[ChunkKey]
    blocks: list[Sequence[int]]
    places: list[tuple[int, int]]
    groups: int
    ends: list[int]

    def add(self, key: ChunkKey, blocks: Sequence[int], group: int, first_block: int) -> None:
        """Add a chunk; add all chunks of a group before the chunks of the next group."""
        self.keys.append(key)
        self.blocks.append(blocks)
        self.places.append((group, first_block))

    def source_of(self, accepted: Iterable[ChunkKey]) -> BlockSpec:
        """Return the blocks of the offered chunks whose keys are in ``accepted``."""
        wanted = set(accepted)
        block_ids: list[int] = []
        sizes = [0] * self.groups
        firsts = [0] * self.groups
        for key, blocks, (group, first) in zip(
            self.keys, self.blocks, self.places, strict=True
        ):
            if key in wanted:
                if not sizes[group]:
                    firsts[group] = first
                sizes[group] += len(blocks)
                block_ids += blocks
        return BlockSpec(tuple(block_ids), tuple(sizes), tuple(firsts))


class StoreRules:
    """Chooses the chunks of a request that are offered for storing.

    Args:
        options: The engine's settings.
        layouts: The engine's KV cache groups.
    """

    def __init__(self, options: SchedulerOptions, layouts: Sequence[GroupLayout]) -> None:
        self._layouts = layouts
        self._store_decode = options.store_decode
        self._retention_tokens = options.retention_tokens
        self._alignment_tokens = math.lcm(*(layout.tokens_per_chunk for layout in layouts))

    def offer(
        self,
        tracked: TrackedRequest,
        tokens: int,
        table: AllocatedBlocks,
        states: Iterable[BoundaryState] = (),
    ) -> Offer:
        """Return the chunks of the first ``tokens`` tokens that were not offered yet.

        Args:
            tracked: The request.
            tokens: Number of leading tokens with KV in the engine after this step.
            table: The request's blocks now.
            states: Recurrent states that the engine offers in this step.
        """
        tokens = int(min(tokens, self.limit_tokens(tracked)))
        offer = Offer([], [], [], len(self._layouts), list(tracked.offered_tokens))
        for number, layout in enumerate(self._layouts):
            if layout.group.is_handed_over:
                final = (state for state in states if state.tokens <= tokens)
                self._add_states(offer, tracked, number, final)
            else:
                end = self._end(tracked, number, tokens)
                self._add_chunks(offer, tracked, number, table, end)
                offer.ends[number] = end
        return offer

    def limit_tokens(self, tracked: TrackedRequest) -> float:
        """Return how many leading tokens of a request may be stored."""
        limit = math.inf if self._store_decode else tracked.request.num_prompt_tokens
        return limit if tracked.store_limit is None else min(limit, tracked.store_limit)

    def next_offer_tokens(self, tracked: TrackedRequest) -> float:
        """Return the token count that completes the next chunk to store; infinity if none."""
        prompt = tracked.request.num_prompt_tokens
        limit = self.limit_tokens(tracked)
        tokens = math.inf
        for layout, offered in zip(self._layouts, tracked.offered_tokens, strict=True):
            if layout.group.is_handed_over:
                continue
            size = layout.tokens_per_chunk
            end = self._next_end(tracked.request, layout, offered)
            if layout.group.is_draft and end > prompt:
                end += size  # it is final one chunk later
            tokens = min(tokens, end)
        return tokens if tokens <= limit else math.inf

    def _end(self, tracked: TrackedRequest, number: int, tokens: int) -> int:
        """Return how many leading tokens of a request have final KV in a group."""
        layout, request = self._layouts[number], tracked.request
        end = min(tokens, len(tracked.keys[number]) * layout.tokens_per_chunk)
        is_decoding = tokens > request.num_prompt_tokens and not request.is_finished()
        if layout.group.is_draft and is_decoding:
            end -= layout.tokens_per_chunk
        return max(end, tracked.offered_tokens[number])

    def _add_chunks(
        self,
        offer: Offer,
        tracked: TrackedRequest,
        number: int,
        table: AllocatedBlocks,
        end: int,
    ) -> None:
        layout, keys = self._layouts[number], tracked.keys[number]
        per_chunk = layout.blocks_per_chunk
        blocks = table.blocks[layout.index]
        for chunk in self._new_chunks(tracked, number, end):
            first = chunk * per_chunk
            some = blocks[first : first + per_chunk]
            if len(some) < per_chunk or any(block.is_null for block in some):
                continue
            offer.add(keys[chunk], [block.block_id for block in some], number, first)

    def _add_states(
        self,
        offer: Offer,
        tracked: TrackedRequest,
        number: int,
        states: Iterable[BoundaryState],
    ) -> None:
        layout = self._layouts[number]
        size = layout.tokens_per_chunk
        for state in states:
            chunk = state.tokens // size - 1
            if state.group == layout.index and not state.tokens % size:
                offer.add(tracked.keys[number][chunk], (state.block_id,), number, chunk)

    def _next_end(self, request: EngineRequest, layout: GroupLayout, offered: int) -> float:
        """Return the end of the next chunk that later hits can use; infinity if none."""
        size = layout.tokens_per_chunk
        chunk = offered // size
        if layout.group.reach is Reach.PREFIX:
            return (chunk + 1) * size
        boundary = next(self._boundaries(request, offered), None)
        if boundary is None:
            return math.inf
        chunk = max(layout.reach.first_token(boundary) // size, chunk)
        return min((chunk + 1) * size, boundary)

    def _new_chunks(self, tracked: TrackedRequest, number: int, end: int) -> Iterable[int]:
        """Return the indices of the new chunks that a later hit can use."""
        layout, limit = self._layouts[number], self.limit_tokens(tracked)
        size, offered = layout.tokens_per_chunk, tracked.offered_tokens[number]
        start, stop = offered // size, end // size
        if layout.group.reach is Reach.PREFIX or start == stop:
            return range(start, stop)
        chunks: list[int] = []
        for boundary in takewhile(limit.__ge__, self._boundaries(tracked.request, offered)):
            start = max(layout.reach.first_token(boundary) // size, start)
            if start >= stop:
                break
            last = min(boundary // size, stop)
            chunks += range(start, last)
            start = max(start, last)
        return chunks

    def _boundaries(self, request: EngineRequest, start: int) -> Iterator[int]:
        """Yield, in ascending order, the token counts above ``start`` at which hits can end."""
        step, retention = self._alignment_tokens, self._retention_tokens
        if retention is None:
            yield from count(start - start % step + step, step)
            return
        prompt = request.num_prompt_tokens
        marks = (prompt - 1, min(request.shared_prefix_boundary, prompt))
        found = {mark - mark % step for mark in marks}
        if retention:
            interval = math.lcm(retention, step)
            found.update(range(start - start % interval + interval, prompt + 1, interval))
        yield from (at for at in sorted(found) if at > start)
        if self._store_decode:
            start = max(start, prompt)
            yield from count(start - start % step + step, step)


def computed_tokens(request: EngineRequest, scheduled: int) -> int:
    """Return how many leading tokens have KV in the engine after this step.

    Args:
        request: The request.
        scheduled: Number of tokens that this step computes for the request.
    """
    if request.is_finished():
        # The last token may have been sampled only, and an aborted request may not have
        # computed its whole prompt.
        known = max(request.num_prompt_tokens, request.num_tokens - 1)
        return min(request.num_computed_tokens, known)
    # Under async scheduling tokens are scheduled before they are known.
    return min(request.num_computed_tokens + scheduled, request.num_tokens)
