"""KV memories of engines with any number of ranks, all holding the same tokens' KV."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvtier.memory.copy import KVBlocks
from kvtier.memory.slot_layout import STRIPES, RankShare

BLOCK_TOKENS = 32
HEAD_SIZE = 64
BLOCKS = 12


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

    def share(self, rank: int, ranks: int) -> RankShare:
        """Return a rank's stripes; ranks with the same head take turns writing."""
        parts = min(self.heads, ranks)
        replicas = ranks // parts
        each = STRIPES // parts
        first = rank // replicas * each
        return RankShare(tuple(range(first, first + each)), replicas, rank % replicas)


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
