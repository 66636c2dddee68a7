"""Which blocks a request still has: the engine never says that a window let go of one.

A sliding window leaves blocks behind while its request runs, and the engine tells the scheduler
half of new blocks only. So a block is taken for lost when it turns up among somebody's new
ones: from then on it holds another content, and what it held for its former holder must not be
stored under that holder's key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from kvtier.connector.protocols import NULL_BLOCK, StepOutput
from kvtier.connector.schedule.tracking import GroupTrack, TrackedRequest

__all__ = ["BlockTables"]


class BlockTables:
    """Keeps the block tables of tracked requests up to date.

    Attributes:
        allocated: Blocks that were given to a request in the current step, shared ones as well.
    """

    def __init__(self) -> None:
        self.allocated: set[int] = set()
        self._holders: dict[int, list[tuple[GroupTrack, int]]] = {}

    def follow(self, step: StepOutput, requests: Mapping[str, TrackedRequest]) -> None:
        """Take over the blocks that ``step`` gives to requests.

        Args:
            step: What the engine decided.
            requests: Every request it names, by id.
        """
        cached = step.scheduled_cached_reqs
        told = (new.req_id for new in step.scheduled_new_reqs)
        for req_id in chain(cached.resumed_req_ids, told):
            requests[req_id].forget_blocks()  # All of them follow.
        grown = [(requests[req_id], new) for req_id, new in _new_blocks(step) if new]
        for tracked, new in grown:
            for group in tracked.groups:
                self.allocated.update(new[group.layout.index])
        self.allocated.discard(NULL_BLOCK)
        self._take_away()
        for tracked, new in grown:
            for group in tracked.groups:
                self._give(group, new[group.layout.index])

    def _take_away(self) -> None:
        """Strike out what was allocated in this step from the tables of its former holders."""
        if not self._holders:
            return
        for block_id in self.allocated:
            for group, place in self._holders.pop(block_id, ()):
                table = group.block_ids
                if place < len(table) and table[place] == block_id:
                    table[place] = NULL_BLOCK

    def _give(self, group: GroupTrack, block_ids: Sequence[int]) -> None:
        place = len(group.block_ids)
        group.block_ids.extend(block_ids)
        if group.layout.window_tokens is None:
            return  # A full attention group has its blocks until its request ends.
        for block_id in block_ids:
            if block_id != NULL_BLOCK:
                self._holders.setdefault(block_id, []).append((group, place))
            place += 1


def _new_blocks(step: StepOutput) -> Iterator[tuple[str, Sequence[Sequence[int]] | None]]:
    for new in step.scheduled_new_reqs:
        yield new.req_id, new.block_ids
    cached = step.scheduled_cached_reqs
    yield from zip(cached.req_ids, cached.new_block_ids, strict=True)
