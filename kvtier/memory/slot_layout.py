"""The layout of a slot: where each rank's bytes are, independent of the number of ranks.

With tensor parallelism every rank keeps the KV of its own attention heads. The simple layout
gives each rank one contiguous range of the slot, its *shard*, with blocks and layers in any
order. Only an engine with as many ranks can read a shard.

A page holds one layer of one block. The pages of all ranks together form the *canonical page*,
which an engine with one rank has. If an engine keeps heads outermost within a page (vLLM's
``LBHNC``), the canonical page is the ranks' pages in order. Then its first eighth has the same
bytes for one, two, four and eight ranks. Hence *stripes*: a slot has eight, and stripe ``s``
holds the ``s``-th eighth of every canonical page, by block and then by layer::

    slot | stripe 0: block 0 [layer 0 | layer 1 | ...] block 1 [...] | ... | stripe 7 | padding

Stripes keep the advantage of shards: a rank's stripes are adjacent, so its part of a slot is
one contiguous range of memory and disk. A shard is the special case of one stripe per rank. An
order with the heads innermost, ``[block][layer][rank]``, would be as portable, but would split
a rank's part into one range per layer.

There are eight stripes, and not one per head, because the engine describes its pages by bytes
and does not say which bytes are a head. Every rank's part of every page must be whole eighths.
That holds for 1, 2, 4 and 8 ranks with heads outermost. It holds if there are more ranks than
heads, so that several ranks have the same head. It also holds if all ranks have the same KV
(multi-head latent attention), which is then stored once. It does not hold for three ranks, for
sixteen with a head each, or with tokens outermost. :func:`share_pages` refuses these, and their
slots have shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

from kvtier.errors import UnsupportedError
from kvtier.memory.control import ControlBlock

__all__ = [
    "STRIPES",
    "CopyRun",
    "PageMapping",
    "RankShare",
    "RegionGeometry",
    "shard_of",
    "share_pages",
]

STRIPES: Final = 8
"""Number of stripes of a slot whose bytes do not depend on the number of ranks."""


class CopyRun(Protocol):
    """Fragments of a rank's page and their places in the canonical page, in bytes.

    Fragment ``i`` spans ``fragment_size`` bytes from ``local_offset + i * local_stride`` and
    from ``canonical_offset + i * canonical_stride``.
    """

    @property
    def local_offset(self) -> int: ...  # noqa: D102
    @property
    def canonical_offset(self) -> int: ...  # noqa: D102
    @property
    def fragment_size(self) -> int: ...  # noqa: D102
    @property
    def num_fragments(self) -> int: ...  # noqa: D102
    @property
    def local_stride(self) -> int: ...  # noqa: D102
    @property
    def canonical_stride(self) -> int: ...  # noqa: D102


class PageMapping(Protocol):
    """Place of a rank's page of one layer in the canonical page.

    vLLM's ``CanonicalPageMapping``. Ranks that have the same bytes take turns writing them:
    ``num_writers`` ranks do, and this one has number ``writer_index``.
    """

    @property
    def canonical_page_size_bytes(self) -> int: ...  # noqa: D102
    @property
    def local_page_size_bytes(self) -> int: ...  # noqa: D102
    @property
    def runs(self) -> Sequence[CopyRun]: ...  # noqa: D102
    @property
    def num_writers(self) -> int: ...  # noqa: D102
    @property
    def writer_index(self) -> int: ...  # noqa: D102
    @property
    def parallelism_agnostic(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class RegionGeometry:
    """Shape of a host region; every process of an engine must use an equal one.

    Attributes:
        slots: Slots of the RAM tier.
        slot_nbytes: Bytes of one slot, a multiple of the page size.
        stripe_nbytes: Bytes of one stripe of a slot; stripe s begins at ``s * stripe_nbytes``.
        stripes: Stripes of a slot; a :class:`RankShare` says which ones a rank has.
        ranks: Workers of the engine.
        is_portable: Whether a slot's bytes mean the same to an engine with other ranks.
        content: Description of the bytes by the worker.
        bounce_slots: Bounce slots for moves between storage tiers, after the RAM tier's slots.
    """

    slots: int
    slot_nbytes: int
    stripe_nbytes: int
    stripes: int
    ranks: int
    is_portable: bool = False
    content: str = ""
    bounce_slots: int = 0

    @property
    def payload_nbytes(self) -> int:
        """Bytes of the RAM tier's slots."""
        return self.slots * self.slot_nbytes

    @property
    def bounce_range(self) -> range:
        """Numbers of the bounce slots."""
        return range(self.slots, self.slots + self.bounce_slots)

    @property
    def shared_nbytes(self) -> int:
        """Bytes of all slots, which a tier's process reads and writes."""
        return self.payload_nbytes + self.bounce_slots * self.slot_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole region, control block included."""
        return self.shared_nbytes + ControlBlock.nbytes(self.slots, self.ranks)


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's part of every slot.

    Attributes:
        stripes: The slot's stripes that the rank reads and writes, in the order of their bytes
            in the rank's own pages.
        writers: Number of ranks that have the same bytes; they take turns by block.
        writer: This rank's number among them.
    """

    stripes: tuple[int, ...]
    writers: int = 1
    writer: int = 0

    def runs(self) -> Iterator[tuple[slice, slice]]:
        """Yield (parts of the rank's pages, stripes) that are contiguous in both."""
        breaks = [at for at, (a, b) in enumerate(pairwise(self.stripes), 1) if b != a + 1]
        for start, end in pairwise([0, *breaks, len(self.stripes)]):
            first = self.stripes[start]
            yield slice(start, end), slice(first, first + end - start)


def shard_of(rank: int) -> RankShare:
    """Return the share of a rank in slots that have one stripe, a shard, for each rank."""
    return RankShare((rank,))


def share_pages(mappings: Sequence[PageMapping | None]) -> RankShare:
    """Return a rank's share of slots whose bytes do not depend on the number of ranks.

    Args:
        mappings: Place of the rank's page of each layer in the layer's canonical page; None
            if the engine does not say.

    Raises:
        UnsupportedError: There is no such share; the message says why.
    """
    shares = {_share_page(mapping) for mapping in mappings}
    if len(shares) != 1:
        raise UnsupportedError(
            "layers are split over the ranks in different ways" if shares else "no layers"
        )
    return shares.pop()


def _share_page(mapping: PageMapping | None) -> RankShare:
    if mapping is None or not mapping.parallelism_agnostic:
        raise UnsupportedError(
            "the engine does not say what a page holds whatever the number of ranks"
        )
    stripe_nbytes, rest = divmod(mapping.canonical_page_size_bytes, STRIPES)
    if rest:
        raise UnsupportedError(
            f"a page of {mapping.canonical_page_size_bytes} bytes has no {STRIPES} equal parts"
        )
    stripes: list[int] = []
    for local, canonical, nbytes in sorted(_contiguous_ranges(mapping.runs)):
        if canonical % stripe_nbytes or nbytes % stripe_nbytes:
            raise UnsupportedError(
                f"a rank's part of a page is not whole {STRIPES}ths of it: {nbytes} bytes from "
                f"{canonical} of {mapping.canonical_page_size_bytes}"
            )
        if local != len(stripes) * stripe_nbytes:
            raise UnsupportedError(f"byte {len(stripes) * stripe_nbytes} of a page is nowhere")
        first = canonical // stripe_nbytes
        stripes += range(first, first + nbytes // stripe_nbytes)
    if len(stripes) * stripe_nbytes != mapping.local_page_size_bytes:
        raise UnsupportedError(f"byte {len(stripes) * stripe_nbytes} of a page is nowhere")
    return RankShare(tuple(stripes), mapping.num_writers, mapping.writer_index)


def _contiguous_ranges(runs: Sequence[CopyRun]) -> list[tuple[int, int, int]]:
    """Return (local offset, canonical offset, bytes), joined where contiguous in both."""
    fragments = sorted(
        (
            run.local_offset + number * run.local_stride,
            run.canonical_offset + number * run.canonical_stride,
            run.fragment_size,
        )
        for run in runs
        for number in range(run.num_fragments)
    )
    joined: list[tuple[int, int, int]] = []
    for local, canonical, nbytes in fragments:
        if joined:
            last_local, last_canonical, last_nbytes = joined[-1]
            if (local, canonical) == (last_local + last_nbytes, last_canonical + last_nbytes):
                joined[-1] = (last_local, last_canonical, last_nbytes + nbytes)
                continue
        joined.append((local, canonical, nbytes))
    return joined
