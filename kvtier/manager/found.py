"""What a request found when it asked: chunks in RAM and below, in its own order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvtier.keys import GROUP_NBYTES, ChunkKey, is_single_group
from kvtier.manager.tier import TierState
from kvtier.policies import ChunkCopy, CopyState

__all__ = ["Found", "survey"]


class Found(NamedTuple):
    """Chunks a request found: a copy of each, and where.

    Attributes:
        copies: In RAM, or else the one to bring up.
        tiers: Index of the tier each is in.
    """

    copies: Sequence[ChunkCopy]
    tiers: Sequence[int]

    @property
    def groups(self) -> int:
        """KV cache groups they belong to."""
        return len(self._per_group())

    @property
    def counted(self) -> int:
        """How many stand for tokens of their own: those of the group that has most.

        That group reads the whole prefix; of a sliding window's only the last chunks were asked
        for.
        """
        return max(self._per_group().values())

    def _per_group(self) -> Counter[bytes]:
        """Return how many there are of each group, by the end of their keys."""
        copies = self.copies
        if copies and is_single_group((copies[0].key, copies[-1].key)):
            return Counter({copies[0].key[-GROUP_NBYTES:]: len(copies)})
        return Counter(copy.key[-GROUP_NBYTES:] for copy in copies)

    @property
    def cost(self) -> int:
        """RAM slots that granting them would newly hold."""
        return sum([bool(tier or not copy.grants) for copy, tier in zip(*self, strict=True)])

    def head(self, chunks: int) -> Found:
        """Return the first ``chunks`` of them."""
        return Found(self.copies[:chunks], self.tiers[:chunks])

    def in_ram(self) -> Found:
        """Return those that need not be brought up."""
        here = [copy for copy, tier in zip(*self, strict=True) if not tier]
        return Found(here, [0] * len(here))

    def affordable(self, grants: int) -> Found:
        """Return the longest head that is of use and newly holds at most ``grants`` slots.

        Of several groups a part is of no use, but for what is in RAM anyway.
        """
        found = self if self.groups == 1 else self.in_ram()
        for end, (copy, tier) in enumerate(zip(*found, strict=True)):
            if tier or not copy.grants:
                grants -= 1
                if grants < 0:
                    return found.head(end)
        return found

    def stranded(self, brought: int) -> list[ChunkCopy]:
        """Return the copies in RAM behind the first chunk beyond the ``brought``, if any."""
        if brought == len(self.tiers) - self.tiers.count(0):
            return []
        behind: list[ChunkCopy] = []
        for copy, tier in zip(*self, strict=True):
            if tier:
                brought -= 1
            elif brought < 0:
                behind.append(copy)
        return behind


def survey(keys: Sequence[ChunkKey], ram: TierState, below: Sequence[TierState]) -> Found:
    """Find ``keys`` in RAM or else ``below``; ends at the first that is nowhere."""
    copies = ram.lead_of(keys)
    tiers = [0] * len(copies)
    rest = keys[len(copies) :]
    if below and ram.copies.keys().isdisjoint(rest):
        copies += below[0].lead_of(rest)
        tiers += [below[0].index] * (len(copies) - len(tiers))
    for key in keys[len(copies) :]:
        copy = ram.copies.get(key)
        if copy is not None:
            if copy.state == CopyState.LATE:
                break
            copies.append(copy)
            tiers.append(0)
            continue
        for tier in below:
            held = tier.copies.get(key)
            if held is not None and held.state == CopyState.RESIDENT:
                copies.append(held)
                tiers.append(tier.index)
                break
        else:
            break
    return Found(copies, tiers)
