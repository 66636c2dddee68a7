"""What to load into a request's fresh blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.connector.groups import ceil_div
from kvtier.connector.metadata import BlockSpec
from kvtier.connector.protocols import AllocatedBlocks, Block
from kvtier.connector.requests import TrackedRequest
from kvtier.errors import UnsupportedError
from kvtier.keys import ChunkKey

__all__ = ["PlannedLoad", "plan_load"]


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """One request's load.

    Attributes:
        keys: Chunks, group after group.
        blocks: Where they go; the first chunk of a group may be partial.
    """

    keys: Sequence[ChunkKey]
    blocks: BlockSpec


def plan_load(
    tracked: TrackedRequest, allocated: AllocatedBlocks, external_tokens: int
) -> PlannedLoad:
    """Return what fills the blocks of the ``external_tokens`` tokens after the local ones.

    In each group that is the blocks from the first fresh one on: those before it are the
    engine's own hits, or places that a sliding window does not need.

    Raises:
        UnsupportedError: The engine's blocks are not those of such a load.
    """
    end_tokens = tracked.local_tokens + external_tokens
    keys: list[ChunkKey] = []
    block_ids: list[int] = []
    sizes: list[int] = []
    firsts: list[int] = []
    for layout, group_keys in zip(tracked.layouts, tracked.keys, strict=True):
        tokens_per_block = layout.group.tokens_per_block
        blocks = allocated.blocks[layout.index]
        end = ceil_div(end_tokens, tokens_per_block)
        end_chunk = ceil_div(end_tokens, layout.tokens_per_chunk)
        if len(blocks) < end or len(group_keys) < end_chunk:
            raise UnsupportedError(
                f"request {tracked.req_id}: the engine asks for tokens {tracked.local_tokens} "
                f"to {end_tokens} of group {layout.index} and has {len(blocks)} blocks of "
                f"{tokens_per_block} tokens and {len(group_keys)} chunks for it"
            )
        first = _first_fresh(blocks, tracked.local_tokens // tokens_per_block, end)
        if first < end:
            keys += group_keys[first // layout.blocks_per_chunk : end_chunk]
            block_ids += [block.block_id for block in blocks[first:end]]
        sizes.append(end - first)
        firsts.append(first)
    return PlannedLoad(keys, BlockSpec(tuple(block_ids), tuple(sizes), tuple(firsts)))


def _first_fresh(blocks: Sequence[Block], start: int, end: int) -> int:
    """Return the first of ``blocks[start:end]`` that is a block without content, or ``end``."""
    for number in range(start, end):
        block = blocks[number]
        if not block.is_null and block.block_hash is None:
            return number
    return end
