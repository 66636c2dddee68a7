"""Which of a request's chunks to offer for storing, and where their blocks are.

Chunks are offered once, in order, as soon as the step that computes their last token is
scheduled: the worker copies them after it. Two rules keep the cache free of bytes nobody can
use, or should.

A chunk is stored whole or not at all. A sliding window may have left some of a chunk's blocks
behind before the last one was computed; the rest could serve some hits, but nothing says which.

In a model whose groups have chunks of different lengths, hits end only where all of them do. A
window group then needs the tails before those ends, and before the end of the request, which a
later turn may continue. That end is the prompt's end as far as anybody knows, and the true one
when the request is over; the last few chunks are looked at once more then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtier.connector.metadata import BlockSpec
from kvtier.connector.protocols import EngineRequest
from kvtier.connector.schedule.tracking import GroupTrack, TrackedRequest
from kvtier.keys import ChunkKey

__all__ = ["Offer", "StoreSource", "computed_tokens", "make_offer"]


@dataclass(frozen=True, slots=True)
class StoreSource:
    """Where accepted chunks are in the engine.

    Attributes:
        blocks: Their blocks.
        lasting: Those that are the request's until it ends.
        passing: Those that a window may leave behind at any step.
    """

    blocks: BlockSpec
    lasting: Sequence[int]
    passing: Sequence[int]


@dataclass(frozen=True, slots=True)
class Offer:
    """Chunks of one request that the cache may want.

    Attributes:
        tracked: The request.
        keys: Their keys, group after group.
        chunks: Their indices, per group.
        ends: Per group, the chunk before which everything has been offered with this.
    """

    tracked: TrackedRequest
    keys: Sequence[ChunkKey]
    chunks: Sequence[Sequence[int]]
    ends: Sequence[int]

    def settle(self) -> None:
        """Note that the cache took what it wanted of it: none of it is offered again."""
        for group, end in zip(self.tracked.groups, self.ends, strict=True):
            group.next_chunk = max(group.next_chunk, end)

    def source_of(self, accepted: Iterable[ChunkKey]) -> StoreSource:
        """Return the blocks of ``accepted``, which is some of the keys in the same order."""
        wanted = set(accepted)
        lasting: list[int] = []
        passing: list[int] = []
        block_ids: list[int] = []
        sizes: list[int] = []
        firsts: list[int] = []
        for group, chunks in zip(self.tracked.groups, self.chunks, strict=True):
            taken = [chunk for chunk in chunks if group.keys[chunk] in wanted]
            ids = [block_id for chunk in taken for block_id in group.blocks_of(chunk)]
            (lasting if group.layout.window_tokens is None else passing).extend(ids)
            block_ids += ids
            sizes.append(len(ids))
            firsts.append(taken[0] * group.layout.blocks_per_chunk if taken else 0)
        blocks = BlockSpec(tuple(block_ids), tuple(sizes), tuple(firsts))
        return StoreSource(blocks, lasting, passing)


def computed_tokens(tracked: TrackedRequest, scheduled: int, *, store_decode: bool) -> int:
    """Return how many leading tokens' KV may be stored after this step.

    Args:
        tracked: The request.
        scheduled: Tokens that this step computes.
        store_decode: Whether that may be more than the prompt.
    """
    request = tracked.request
    if request.is_finished():
        # The last token was sampled and need not have been computed; and a request that was
        # aborted may not have computed its prompt.
        known = max(request.num_prompt_tokens, request.num_tokens - 1)
        tokens = min(request.num_computed_tokens, known)
    else:
        # Under async scheduling tokens are scheduled before anybody knows them.
        tokens = min(request.num_computed_tokens + scheduled, request.num_tokens)
    return _capped(tracked, tokens, store_decode=store_decode)


def make_offer(tracked: TrackedRequest, tokens: int, *, store_decode: bool) -> Offer:
    """Return what is new among the chunks of the first ``tokens`` tokens."""
    prompt = _capped(tracked, tracked.request.num_prompt_tokens, store_decode=store_decode)
    keys: list[ChunkKey] = []
    chunks: list[Sequence[int]] = []
    ends: list[int] = []
    for group in tracked.groups:
        end = group.storable_chunks(tokens)
        prompt_end = prompt // group.layout.tokens_per_chunk
        new = _new_chunks(group, tracked.request, end, prompt_end)
        keys.extend(group.keys[chunk] for chunk in new)
        chunks.append(new)
        ends.append(end)
    return Offer(tracked, keys, chunks, ends)


def _capped(tracked: TrackedRequest, tokens: int, *, store_decode: bool) -> int:
    if tracked.store_limit is not None:
        tokens = min(tokens, tracked.store_limit)
    return tokens if store_decode else min(tokens, tracked.request.num_prompt_tokens)


def _new_chunks(
    group: GroupTrack, request: EngineRequest, end: int, prompt_end: int
) -> Sequence[int]:
    """Return the chunks before chunk ``end`` that are worth storing and were not offered."""
    layout = group.layout
    if layout.window_tokens is None:
        return range(group.next_chunk, end)
    ends: list[int] = []
    late: list[int] = []
    if layout.aligned_tokens:
        marks = (request.num_prompt_tokens - 1, request.shared_prefix_boundary)
        ends = [layout.aligned_end(tokens) for tokens in marks]
    elif request.is_finished():
        ends = [end * layout.blocks_per_chunk]
        late = _late_chunks(group, end, prompt_end)
    elif end <= prompt_end:
        ends = [prompt_end * layout.blocks_per_chunk]
    fresh = [at for at in range(group.next_chunk, end) if layout.is_useful(at, ends)]
    return [chunk for chunk in late + fresh if group.has_whole(chunk)]


def _late_chunks(group: GroupTrack, end: int, prompt_end: int) -> list[int]:
    """Return chunks passed over that are useful because the request ended at ``end``."""
    layout = group.layout
    if not layout.is_sparse or end == prompt_end:
        return []
    foreseen, true = ([at * layout.blocks_per_chunk] for at in (prompt_end, end))
    return [
        chunk
        for chunk in range(layout.last_segment(end), min(group.next_chunk, end))
        if layout.is_useful(chunk, true) and not layout.is_useful(chunk, foreseen)
    ]
