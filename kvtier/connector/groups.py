"""Describes to the scheduler side how each KV cache group is divided into chunks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvtier.errors import UnsupportedError
from kvtier.keys import counting_group
from kvtier.manager import GroupReach, Reach

__all__ = [
    "CacheGroup",
    "GroupLayout",
    "SchedulerOptions",
    "build_layouts",
    "ceil_div",
    "describe_groups",
    "parse_groups",
]


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One KV cache group as its engine describes it.

    Attributes:
        tokens_per_block: Number of tokens of one block.
        index: Number of the group in the engine's block tables and in keys.
        reach: The part of a prefix that the group's layers read.
        window_tokens: Number of tokens of a sliding window, or of a chunk of local attention.
        is_draft: Whether the group has layers of a draft model. A draft model may rewrite the
            KV of the newest tokens.
        is_handed_over: Whether the engine lists the states to store in each step.
    """

    tokens_per_block: int
    index: int = 0
    reach: Reach = Reach.PREFIX
    window_tokens: int = 0
    is_draft: bool = False
    is_handed_over: bool = False


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """The settings of an engine that the scheduler side needs.

    Attributes:
        groups: The KV cache groups that are stored.
        tokens_per_hash: Number of tokens that a block hash adds to the hash before it.
        blocks_per_chunk: Number of blocks that are stored and loaded together.
        ranks: Number of workers that must acknowledge a job.
        store_decode: Whether chunks that hold generated tokens are stored.
        retention_tokens: Number of tokens, for groups with a window or a state. Hits can end at
            every multiple of this number, and at the ends of the prompt and of a shared prefix.
            With 0, hits can end only at these two ends; with None, at every chunk boundary.
        shares_blocks: Whether requests share blocks in the engine. If so, a request waits
            while another request loads the same chunks.
        continues_from_right_kv: Whether the engine's KV is still correct after a streamed
            prompt was continued.
    """

    groups: tuple[CacheGroup, ...]
    tokens_per_hash: int
    blocks_per_chunk: int = 1
    ranks: int = 1
    store_decode: bool = False
    retention_tokens: int | None = None
    shares_blocks: bool = True
    continues_from_right_kv: bool = True

    @property
    def counting_group(self) -> int:
        """Index of the group used to count tokens."""
        return counting_group({each.index: each.reach is Reach.PREFIX for each in self.groups})


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """How one KV cache group is divided into chunks.

    Attributes:
        group: The group.
        reach: The part of a prefix that a hit needs in this group.
        tokens_per_chunk: Number of tokens of one chunk.
        hashes_per_chunk: Number of block hashes of one chunk.
        blocks_per_chunk: Number of blocks of one chunk.
    """

    group: CacheGroup
    reach: GroupReach
    tokens_per_chunk: int
    hashes_per_chunk: int
    blocks_per_chunk: int

    @property
    def index(self) -> int:
        """Number of the group, in the engine's block tables and in keys."""
        return self.group.index


def ceil_div(number: int, by: int) -> int:
    """Return ``number / by`` rounded up."""
    return -(-number // by)


def build_layouts(options: SchedulerOptions) -> tuple[GroupLayout, ...]:
    """Return the chunk layout of each group of ``options``, in the order of the groups.

    Raises:
        UnsupportedError: There is no group, or hashes, blocks and chunks do not match.
    """
    if not options.groups:
        raise UnsupportedError(
            "the engine has no KV cache group that kvtier can store: start vLLM without kvtier"
        )
    return tuple(_layout(group, options) for group in options.groups)


def describe_groups(
    indices: Sequence[int], groups: Sequence[GroupReach], *, tokens_per_hash: int
) -> tuple[dict[str, str | int], ...]:
    """Describe KV cache groups as JSON values, which :func:`parse_groups` can read.

    Args:
        indices: Number of each group in keys.
        groups: The groups, in the same order.
        tokens_per_hash: Number of tokens that a block hash adds to the hash before it.
    """
    return tuple(
        {
            "index": index,
            "tokens_per_hash": tokens_per_hash,
            "chunk_tokens": group.chunk_tokens,
            "reach": group.reach.value,
            "window_tokens": group.window_tokens,
        }
        for index, group in zip(indices, groups, strict=True)
    )


def parse_groups(
    described: Collection[Mapping[str, str | int]],
) -> tuple[int, tuple[tuple[int, GroupReach], ...]]:
    """Read the values that :func:`describe_groups` wrote.

    Returns:
        The number of tokens per hash, and for each group its number in keys and its reach.

    Raises:
        ValueError: The values are not from :func:`describe_groups`.
    """
    try:
        groups = tuple((int(group["index"]), _parse_reach(group)) for group in described)
        (tokens_per_hash,) = {int(group["tokens_per_hash"]) for group in described}
    except (KeyError, TypeError) as error:
        raise ValueError(f"not KV cache groups: {error!r}") from error
    return tokens_per_hash, groups


def _parse_reach(group: Mapping[str, str | int]) -> GroupReach:
    tokens, window_tokens = int(group["chunk_tokens"]), int(group["window_tokens"])
    return GroupReach(tokens, Reach(group["reach"]), window_tokens)


def _layout(group: CacheGroup, options: SchedulerOptions) -> GroupLayout:
    if group.tokens_per_block % options.tokens_per_hash:
        raise UnsupportedError(
            f"KV cache group {group.index} has blocks of {group.tokens_per_block} tokens and "
            f"the engine hashes {options.tokens_per_hash} tokens at a time: a block must be a "
            "whole number of hashes"
        )
    if group.reach is Reach.STATE and options.blocks_per_chunk > 1:
        raise UnsupportedError(
            "this model keeps recurrent states, and only the last state of a chunk could be "
            "used: set engine.blocks_per_chunk: 1"
        )
    tokens_per_chunk = group.tokens_per_block * options.blocks_per_chunk
    return GroupLayout(
        group=group,
        reach=GroupReach(tokens_per_chunk, group.reach, group.window_tokens),
        tokens_per_chunk=tokens_per_chunk,
        hashes_per_chunk=tokens_per_chunk // options.tokens_per_hash,
        blocks_per_chunk=options.blocks_per_chunk,
    )
