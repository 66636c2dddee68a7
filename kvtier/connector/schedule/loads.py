"""What to load into a request's fresh blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.connector.metadata import BlockSpec
from kvtier.connector.protocols import AllocatedBlocks, Block
from kvtier.connector.schedule.groups import ceil_div
from kvtier.connector.schedule.tracking import GroupTrack, TrackedRequest
from kvtier.errors import UnsupportedError
from kvtier.keys import ChunkKey

__all__ = ["PlannedLoad", "plan_load"]


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """One request's load.

    Attributes:
        keys: Chunks, group after group.
        blocks: Where they go; the first and the last chunk of a group may be partial.
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
    for group in tracked.groups:
        layout = group.layout
        blocks = allocated.blocks[layout.index]
        end = ceil_div(end_tokens, layout.tokens_per_block)
        if len(blocks) < end or tracked.local_tokens % layout.tokens_per_block:
            raise UnsupportedError(
                f"request {tracked.req_id}: the engine asks for tokens "
                f"{tracked.local_tokens} to {end_tokens} of group {layout.index} and has "
                f"{len(blocks)} blocks of {layout.tokens_per_block} tokens for it"
            )
        first = _first_fresh(blocks, tracked.local_tokens // layout.tokens_per_block, end)
        if first < end:
            keys += _chunks(group, first, end_tokens)
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


def _chunks(group: GroupTrack, first_block: int, end_tokens: int) -> list[ChunkKey]:
    layout = group.layout
    end = ceil_div(end_tokens, layout.tokens_per_chunk)
    if end > len(group.keys):
        raise UnsupportedError(
            f"the engine asks for {end} chunks of a request that has {len(group.keys)}"
        )
    return group.keys[first_block // layout.blocks_per_chunk : end]
