"""KV memories of engines with any number of ranks, all holding the same tokens' KV."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvtier.memory.copy import KVBlocks

BLOCK_TOKENS = 32
HEAD_SIZE = 64
BLOCKS = 12


@dataclass(frozen=True, slots=True)
class Run:
    """Fragments of a page; see :class:`kvtier.memory.slot_layout.CopyRun`."""

    local_offset: int
    canonical_offset: int
    fragment_size: int
    num_fragments: int
    local_stride: int
    canonical_stride: int


@dataclass(frozen=True, slots=True)
class Mapping:
    """How a page lies in the canonical page; what vLLM would give."""

    canonical_page_size_bytes: int
    local_page_size_bytes: int
    runs: tuple[Run, ...]
    num_writers: int = 1
    writer_index: int = 0
    parallelism_agnostic: bool = True


def one_run(local: int, canonical: int, nbytes: int) -> Run:
    return Run(local, canonical, nbytes, 1, nbytes, nbytes)


@dataclass(frozen=True, slots=True)
class Model:
    """A model's KV cache: float32, heads outermost, K and V side by side for each token.

    The shapes are those vLLM 0.32 allocates on a CPU for the layout ``LBHNC``:
    (blocks, heads, tokens, 2 x head size) for each layer.
    """

    heads: int = 2
    layers: int = 2

    @property
    def head_nbytes(self) -> int:
        return BLOCK_TOKENS * 2 * HEAD_SIZE * 4

    @property
    def canonical_nbytes(self) -> int:
        return self.heads * self.head_nbytes

    def whole(self) -> list[torch.Tensor]:
        """Return each layer's KV with all heads: what is the same however it is split."""
        shape = (BLOCKS, self.heads, BLOCK_TOKENS, 2 * HEAD_SIZE)
        numbers = torch.arange(self.layers * math.prod(shape), dtype=torch.float32)
        return list(numbers.reshape(self.layers, *shape))

    def heads_of(self, rank: int, ranks: int) -> slice:
        """Return the heads a rank keeps: its share, or the one it has in common with others."""
        if ranks > self.heads:
            head = rank * self.heads // ranks
            return slice(head, head + 1)
        share = self.heads // ranks
        return slice(rank * share, (rank + 1) * share)

    def mapping(self, rank: int, ranks: int) -> Mapping:
        own = self.heads_of(rank, ranks)
        nbytes = (own.stop - own.start) * self.head_nbytes
        alike = max(ranks // self.heads, 1)
        return Mapping(
            canonical_page_size_bytes=self.canonical_nbytes,
            local_page_size_bytes=nbytes,
            runs=(one_run(0, own.start * self.head_nbytes, nbytes),),
            num_writers=alike,
            writer_index=rank % alike,
        )

    def split_mapping(self, rank: int, ranks: int) -> Mapping:
        """Return the mapping of a page that has all of K before all of V."""
        own = self.heads_of(rank, ranks)
        half, nbytes = (
            self.canonical_nbytes // 2,
            (own.stop - own.start) * self.head_nbytes // 2,
        )
        first = own.start * self.head_nbytes // 2
        runs = (one_run(0, first, nbytes), one_run(nbytes, half + first, nbytes))
        return Mapping(self.canonical_nbytes, 2 * nbytes, runs)

    def token_mapping(self, rank: int, ranks: int) -> Mapping:
        """Return the mapping of a page that has tokens outermost: one fragment for each."""
        own = self.heads_of(rank, ranks)
        row = 2 * HEAD_SIZE * 4
        local = (own.stop - own.start) * row
        run = Run(0, own.start * row, local, BLOCK_TOKENS, local, self.heads * row)
        return Mapping(self.canonical_nbytes, BLOCK_TOKENS * local, (run,))


def kv_of(layers: list[torch.Tensor], heads: slice) -> KVBlocks:
    """Return a rank's KV memory as bytes, one tensor for each layer."""
    pages = [layer[:, heads].contiguous().view(torch.int8).flatten(1) for layer in layers]
    groups = [[(number, page.shape[1]) for number, page in enumerate(pages)]]
    return KVBlocks(pages, groups)


def block_bytes(kv: KVBlocks, group: int, block: int) -> bytes:
    """Return what ``block`` holds of ``group``, layer after layer."""
    return b"".join(
        kv.tensors[tensor][block, :page].numpy().tobytes() for tensor, page in kv.groups[group]
    )
