"""Plans which chunks to load into a request's new blocks."""

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
        blocks: Their blocks; the first chunk of a group may be partial.
    """

    keys: Sequence[ChunkKey]
    blocks: BlockSpec


def plan_load(
    tracked: TrackedRequest, allocated: AllocatedBlocks, external_tokens: int
) -> PlannedLoad:
    """Return the load that fills the blocks of ``external_tokens`` tokens after the local ones.

    In each group it begins at the first new block. The blocks before that are hits of the
    engine's own cache, or outside a sliding window.

    Raises:
        UnsupportedError: The engine's blocks do not fit the load.
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
        first = _first_new(blocks, tracked.local_tokens // tokens_per_block, end)
        if first < end:
            keys += group_keys[first // layout.blocks_per_chunk : end_chunk]
            block_ids += [block.block_id for block in blocks[first:end]]
        sizes.append(end - first)
        firsts.append(first)
    return PlannedLoad(keys, BlockSpec(tuple(block_ids), tuple(sizes), tuple(firsts)))


def _first_new(blocks: Sequence[Block], start: int, end: int) -> int:
    """Return the index of the first block without content, or ``end``."""
    for number in range(start, end):
        block = blocks[number]
        if not block.is_null and block.block_hash is None:
            return number
    return end
