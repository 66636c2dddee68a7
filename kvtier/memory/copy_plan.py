"""Plans of block copies: each plan pairs blocks of the engine with RAM slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvtier.errors import UnsupportedError
from kvtier.memory.slot_layout import Flags, Indices

__all__ = ["BlockCopyPlan", "GroupCopy", "Indices", "plan_copy"]


@dataclass(frozen=True, slots=True)
class GroupCopy:
    """The blocks of one KV cache group to copy, sorted by ``places`` and then by ``slots``.

    Attributes:
        group: Index of the group.
        blocks: Block numbers in the engine's memory, shape (n,).
        slots: RAM slot of each block, shape (n,).
        places: Place of each block in its slot, shape (n,).
    """

    group: int
    blocks: Indices
    slots: Indices
    places: Indices

    def part(self, which: slice | Flags) -> GroupCopy:
        """Return the blocks that the index ``which`` selects, in the same order."""
        return GroupCopy(self.group, self.blocks[which], self.slots[which], self.places[which])


class BlockCopyPlan:
    """A batch of block copies, all in one direction.

    Args:
        groups: The blocks to copy, by KV cache group; or a function that returns them. The
            function is called when the groups are first used. So the copying thread spends this
            time, and not the model thread, which makes the plan.
        slots: The RAM slots involved, each once.

    Attributes:
        slots: The RAM slots involved, each once.
    """

    def __init__(
        self,
        groups: Sequence[GroupCopy] | Callable[[], Sequence[GroupCopy]],
        slots: Sequence[int],
    ) -> None:
        self._groups = groups
        self.slots = slots

    @property
    def groups(self) -> Sequence[GroupCopy]:
        """The blocks to copy, by KV cache group."""
        groups = self._groups  # another thread may replace it meanwhile
        if not isinstance(groups, Sequence):
            groups = self._groups = groups()
        return groups

    def restricted_to(self, slots: Sequence[int]) -> BlockCopyPlan:
        """Return a plan with only the copies for ``slots``, a subset of this plan's slots."""
        wanted = np.asarray(slots, np.int64)
        parts = []
        for copy in self.groups:
            chosen = np.isin(copy.slots, wanted)
            if chosen.any():
                parts.append(copy.part(chosen))
        return BlockCopyPlan(parts, slots)

    def slot_indices(self, copy: GroupCopy) -> Indices:
        """Return, for each slot of ``copy``, the slot's index in :attr:`slots`."""
        slots = np.asarray(self.slots, np.int64)
        order = np.argsort(slots, kind="stable")
        indices: Indices = order[np.searchsorted(slots, copy.slots, sorter=order)]
        return indices

    def with_slots(self, slots: Sequence[int]) -> BlockCopyPlan:
        """Return this plan with its ``i``-th slot replaced by ``slots[i]``."""
        numbers = np.asarray(slots, np.int64)
        groups = []
        for copy in self.groups:
            moved = numbers[self.slot_indices(copy)]
            order = np.lexsort((moved, copy.places))
            groups.append(
                GroupCopy(copy.group, copy.blocks[order], moved[order], copy.places[order])
            )
        return BlockCopyPlan(groups, slots)

    def joined_with(self, others: Sequence[BlockCopyPlan]) -> BlockCopyPlan:
        """Return one plan that copies the blocks of this plan and of ``others``."""
        if not others:
            return self
        plans = (self, *others)
        copies: dict[int, list[GroupCopy]] = {}
        for plan in plans:
            for copy in plan.groups:
                copies.setdefault(copy.group, []).append(copy)
        groups = [_join(group, parts) for group, parts in copies.items()]
        return BlockCopyPlan(groups, [slot for plan in plans for slot in plan.slots])

    def slots_filled(self, blocks_per_chunk: int) -> Sequence[int]:
        """Return the slots that provably have all blocks of their chunk after a store.

        A group's first chunk may lack its first blocks; the index of the group's first block
        says how many. The engine may also leave out other blocks, without reporting them. Then
        later blocks are copied to wrong places, and the group's last chunk lacks its last
        blocks. In this case no slot of the group counts as filled.
        """
        if blocks_per_chunk == 1 or not self.groups:
            return self.slots
        filled: set[int] = set()
        for copy in self.groups:
            numbers, blocks = np.unique(copy.slots, return_counts=True)
            if np.count_nonzero(copy.places == blocks_per_chunk - 1) == len(numbers):
                filled.update(numbers[blocks == blocks_per_chunk].tolist())
        return self.slots if len(filled) == len(self.slots) else sorted(filled)


def plan_copy(
    block_ids: Sequence[int] | Indices,
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    slots: Sequence[int],
    *,
    blocks_per_chunk: int,
) -> BlockCopyPlan:
    """Match an engine's blocks with the RAM slots of their chunks.

    The sequences must not change before the copies end, because the blocks are matched when
    :attr:`BlockCopyPlan.groups` is first used.

    Args:
        block_ids: Block numbers, group after group.
        group_sizes: Number of ``block_ids`` of each group.
        block_indices: Index, within the request, of each group's first block. If it is not
            a multiple of ``blocks_per_chunk``, the group's first chunk is partial. The last
            chunk may be partial too.
        slots: RAM slots of the chunks, group after group.
        blocks_per_chunk: Blocks of a chunk.

    Raises:
        UnsupportedError: Blocks and slots do not match.
    """
    chunks = sum(
        -(-(first % blocks_per_chunk + size) // blocks_per_chunk)
        for size, first in zip(group_sizes, block_indices, strict=True)
        if size
    )
    blocks = sum(group_sizes)
    if blocks == len(block_ids) and chunks == len(slots):
        match = partial(_match, block_ids, group_sizes, block_indices, slots, blocks_per_chunk)
        return BlockCopyPlan(match, slots)
    if chunks > len(slots):
        raise UnsupportedError(f"the blocks need more than the {len(slots)} slots given")
    if blocks == len(block_ids):
        # Blocks after a gap have moved up, so it is unknown which chunks are whole.
        raise UnsupportedError(
            f"some blocks of the chunks are missing: the {blocks} given belong to {chunks} "
            f"chunks, not to {len(slots)}"
        )
    raise UnsupportedError(
        f"{len(block_ids)} blocks and {len(slots)} slots were given, but the groups have "
        f"{blocks} blocks and {chunks} chunks"
    )


def _match(
    block_ids: Sequence[int] | Indices,
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    slots: Sequence[int],
    blocks_per_chunk: int,
) -> list[GroupCopy]:
    """Match the blocks of each group with their slots. The arguments must be valid."""
    blocks = np.asarray(block_ids, np.int64)
    numbers = np.asarray(slots, np.int64)
    groups: list[GroupCopy] = []
    block_at = slot_at = 0
    for group, (size, first) in enumerate(zip(group_sizes, block_indices, strict=True)):
        if not size:
            continue
        chunks, places = np.divmod(np.arange(size) + first % blocks_per_chunk, blocks_per_chunk)
        of_block = numbers[slot_at + chunks]
        order = np.lexsort((of_block, places))
        own = blocks[block_at : block_at + size]
        groups.append(GroupCopy(group, own[order], of_block[order], places[order]))
        block_at += size
        slot_at += int(chunks[-1]) + 1
    return groups


def _join(group: int, copies: Sequence[GroupCopy]) -> GroupCopy:
    """Merge ``copies`` of one group into one, ordered by (place, slot)."""
    blocks = np.concatenate([copy.blocks for copy in copies])
    slots = np.concatenate([copy.slots for copy in copies])
    places = np.concatenate([copy.places for copy in copies])
    order = np.lexsort((slots, places))
    return GroupCopy(group, blocks[order], slots[order], places[order])
