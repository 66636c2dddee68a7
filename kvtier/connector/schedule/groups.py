"""KV cache groups in chunks: how tokens, blocks, hashes and windows relate.

A model's layers fall into groups with a block table each. Layers of a *full attention* group
read the whole prefix, so its hit is the longest run of chunks from the first. Layers of a
*sliding window* group read the last ``window_tokens`` tokens, so its hit is any run of chunks
that covers the window before the first token to compute, and what lies before it is neither
loaded nor worth keeping.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.errors import UnsupportedError

__all__ = ["CacheGroup", "GroupLayout", "SchedulerOptions", "build_layouts", "ceil_div"]


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One KV cache group as its engine describes it.

    Attributes:
        tokens_per_block: Tokens of one block.
        window_tokens: How far back a token sees, itself included; None for all the way.
        index: Which of the engine's block tables is the group's, and the index in its keys.
    """

    tokens_per_block: int
    window_tokens: int | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """How an engine is set up, as far as the scheduler half must know.

    Attributes:
        groups: The KV cache groups whose blocks are kept.
        tokens_per_hash: Tokens that each of a request's block hashes adds.
        blocks_per_chunk: Blocks that are stored and loaded together.
        ranks: Workers that must acknowledge a job.
        store_decode: Whether chunks that hold generated tokens are stored.
        retention_tokens: How densely the tails of windows are stored: None for those before
            every length that hits of all groups can have, a number for those before its
            multiples, 0 for none of them; and those before the end of the prompt, and where it
            leaves another request's.
        shares_blocks: Whether requests share blocks in the engine, so that of two that want
            the same chunks one had better wait for the other's load.
    """

    groups: tuple[CacheGroup, ...]
    tokens_per_hash: int
    blocks_per_chunk: int = 1
    ranks: int = 1
    store_decode: bool = False
    retention_tokens: int | None = None
    shares_blocks: bool = True


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """A group in chunks.

    Attributes:
        index: Which of the engine's block tables is the group's, and the index in its keys.
        tokens_per_block: Tokens of one block.
        tokens_per_chunk: Tokens of one chunk.
        hashes_per_chunk: Block hashes of one chunk.
        blocks_per_chunk: Blocks of one chunk.
        window_tokens: How far back a token sees; None for all the way.
        window_chunks: Chunks that surely cover the window before a chunk's end; 0 for all.
        is_sparse: Whether some whole chunks can never serve a hit, or shall not.
        segment_blocks: Tails before its multiples are stored; 0 for none.
        tail_blocks: Blocks of a tail: what the window covers.
        aligned_tokens: Tails before the ends of prompts are stored and these ends are rounded
            down to its multiples; 0 if the true ends of requests count.
    """

    index: int
    tokens_per_block: int
    tokens_per_chunk: int
    hashes_per_chunk: int
    blocks_per_chunk: int
    window_tokens: int | None
    window_chunks: int
    is_sparse: bool
    segment_blocks: int
    tail_blocks: int
    aligned_tokens: int

    def chunks_needed(self, end_tokens: int) -> int:
        """Return how many chunks, up to that of token ``end_tokens - 1``, a hit needs.

        A hit that ends inside its last chunk may reach one chunk further back than one that
        ends with it.
        """
        if self.window_tokens is None:
            return 0
        padding = -end_tokens % self.tokens_per_chunk
        reach = self.window_tokens - 1 + padding
        return max(self.window_chunks, ceil_div(reach, self.tokens_per_chunk))

    def is_useful(self, chunk: int, end_blocks: Iterable[int]) -> bool:
        """Return whether ``chunk`` can serve a hit.

        Args:
            chunk: Index in the request.
            end_blocks: Where later hits may end besides the multiples of a segment.
        """
        if not self.is_sparse:
            return True
        segment, tail = self.segment_blocks, self.tail_blocks
        first = chunk * self.blocks_per_chunk
        last = first + self.blocks_per_chunk
        if segment and any(at % segment >= segment - tail for at in range(first, last)):
            return True
        return any(first < end and end - tail < last for end in end_blocks)

    def last_segment(self, end_chunks: int) -> int:
        """Return the first chunk of the segment that ``end_chunks`` cuts short."""
        end = end_chunks * self.blocks_per_chunk
        return (end - end % self.segment_blocks) // self.blocks_per_chunk

    def aligned_end(self, tokens: int) -> int:
        """Return the last block before which a hit of at most ``tokens`` tokens can end."""
        return (tokens - tokens % self.aligned_tokens) // self.tokens_per_block


def ceil_div(number: int, by: int) -> int:
    """Return ``number / by`` rounded up."""
    return -(-number // by)


def build_layouts(options: SchedulerOptions) -> tuple[GroupLayout, ...]:
    """Return the groups of ``options`` in chunks, in the same order.

    Raises:
        UnsupportedError: There is no group, or hashes and blocks do not fit together.
    """
    if not options.groups:
        raise UnsupportedError("the engine has no KV cache group whose blocks could be kept")
    alignment = _alignment_tokens(options)
    layouts = []
    for group in options.groups:
        if group.tokens_per_block % options.tokens_per_hash:
            raise UnsupportedError(
                f"KV cache group {group.index} has blocks of {group.tokens_per_block} tokens "
                f"and the engine hashes {options.tokens_per_hash} tokens at a time: a block "
                "must be a whole number of hashes"
            )
        tokens_per_chunk = group.tokens_per_block * options.blocks_per_chunk
        if group.window_tokens and (options.retention_tokens or 0) % tokens_per_chunk:
            raise UnsupportedError(
                f"tails are to be retained every {options.retention_tokens} tokens, which is "
                f"no multiple of the {tokens_per_chunk} tokens of a chunk"
            )
        layouts.append(_layout(group, options, alignment))
    return tuple(layouts)


def _alignment_tokens(options: SchedulerOptions) -> int | None:
    """Return the length whose multiples all hits are, or None if there is no such length."""
    full = {g.tokens_per_block for g in options.groups if g.window_tokens is None}
    if len(full) > 1:
        return None
    if not full:
        full = {max(group.tokens_per_block for group in options.groups)}
    return full.pop() * options.blocks_per_chunk


def _layout(
    group: CacheGroup, options: SchedulerOptions, alignment_tokens: int | None
) -> GroupLayout:
    tokens_per_chunk = group.tokens_per_block * options.blocks_per_chunk
    window, retention = group.window_tokens, options.retention_tokens
    tail = ceil_div((window or 1) - 1, group.tokens_per_block)
    # Where the tails of a window could not be told apart block by block, all chunks are stored.
    aligned = alignment_tokens or 0
    sparse = bool(window and aligned) and aligned % group.tokens_per_block == 0
    segment = aligned if retention is None else retention
    segment_blocks = segment // group.tokens_per_block
    return GroupLayout(
        index=group.index,
        tokens_per_block=group.tokens_per_block,
        tokens_per_chunk=tokens_per_chunk,
        hashes_per_chunk=tokens_per_chunk // options.tokens_per_hash,
        blocks_per_chunk=options.blocks_per_chunk,
        window_tokens=window,
        window_chunks=0 if window is None else ceil_div(window, tokens_per_chunk),
        is_sparse=sparse and not 0 < segment_blocks <= tail,
        segment_blocks=segment_blocks,
        tail_blocks=tail,
        aligned_tokens=0 if retention is None else aligned,
    )
