"""KV memories of engines with any number of ranks, all holding the same tokens' KV."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvtier.memory.copy import KVBlocks
from kvtier.memory.slot_layout import RankShare

BLOCK_TOKENS = 32
HEAD_SIZE = 64
BLOCKS = 12

LAYOUTS: Final = {
    "LBHNC": (0, 1, 2, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""vLLM's layouts with tokens inside heads: in which order its five dimensions are in memory."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model's KV cache: heads outside tokens, K and V side by side for each token.

    The defaults are the shapes of vLLM 0.32 on a CPU, which has float32 in the layout
    ``LBHNC``: (blocks, heads, tokens, 2 x head size) for each layer.
    """

    heads: int = 2
    layers: int = 2
    tokens: int = BLOCK_TOKENS
    head_size: int = HEAD_SIZE
    dtype: torch.dtype = torch.float32

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block with all heads of all layers."""
        content = 2 * self.head_size * self.dtype.itemsize
        return self.layers * self.heads * self.tokens * content

    def whole(self) -> list[torch.Tensor]:
        """Return each layer's KV with all heads: what is the same however it is split."""
        shape = (BLOCKS, self.heads, self.tokens, 2 * self.head_size)
        numbers = torch.arange(self.layers * math.prod(shape)).to(self.dtype)
        return list(numbers.reshape(self.layers, *shape))

    def heads_of(self, rank: int, ranks: int) -> slice:
        """Return the heads a rank keeps: its share, or the one it has in common with others."""
        if ranks > self.heads:
            head = rank * self.heads // ranks
            return slice(head, head + 1)
        share = self.heads // ranks
        return slice(rank * share, (rank + 1) * share)

    def share(self, rank: int, ranks: int) -> RankShare:
        """Return a rank's share; ranks with the same head take turns writing."""
        parts = min(self.heads, ranks)
        replicas = ranks // parts
        return RankShare(rank // replicas, parts, replicas, rank % replicas)


def kv_of(
    layers: Sequence[torch.Tensor], heads: slice, layout: str = "LBHNC", padding: int = 0
) -> KVBlocks:
    """Return a rank's KV memory as bytes, and a block's pages in one group.

    Args:
        layers: Each layer's KV with all heads: (blocks, heads, tokens, content).
        heads: The rank's heads.
        layout: The order of the dimensions in memory.
        padding: Bytes behind every page, or behind every block where blocks are outermost.
    """
    content = torch.stack([layer[:, heads] for layer in layers])
    content = content.permute(LAYOUTS[layout]).contiguous().view(torch.int8)
    rows = content.flatten(2) if layout == "LBHNC" else content.flatten(1)
    memory = torch.nn.functional.pad(rows, (0, padding))
    used = memory[..., : rows.shape[-1]]
    if layout == "BHLNC":
        pages = [used]
    else:
        pages = list(used) if layout == "LBHNC" else list(used.chunk(len(layers), 1))
    return KVBlocks(pages, [[(number, page.shape[1]) for number, page in enumerate(pages)]])


def block_bytes(kv: KVBlocks, group: int, block: int) -> bytes:
    """Return what ``block`` holds of ``group``, page after page."""
    return b"".join(
        kv.tensors[tensor][block, :page].numpy().tobytes() for tensor, page in kv.groups[group]
    )
