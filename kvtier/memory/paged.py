"""Paged KV memory with verifiable content, for tests and ``kvtier replay``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvtier.errors import ConfigError
from kvtier.memory.copy import KVBlocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PagedMemory"]

_WORD_NBYTES: Final = 8
_STEP: Final = 0x1D872B41_5B1B8E3D
"""Difference between two consecutive words of a layer. An odd number makes all words of a layer
different; a large number makes all bytes of two consecutive words different."""
_LAYER_STEP: Final = 0x2545F491_4F6CDD1D


class PagedMemory:
    """KV memory of several layers. A block's content is computed from a number, its *seed*.

    Word ``i`` of layer ``l`` of a block is ``seed + i * a + l * b`` modulo 2**64. So
    :meth:`holds` detects bytes of another block and bytes at a wrong position. Blocks are
    filled and compared in the caller's thread: torch's own threads would busy-wait on
    processors that the tiers need.

    Args:
        layers: Number of layers; each has its own tensor, as in engines.
        blocks: Number of blocks; block 0 is never used.
        block_nbytes: Bytes of a block, all layers together.

    Raises:
        ConfigError: The layers' pages are not whole words.

    Attributes:
        kv: The same memory, in the form that the worker side expects.
    """

    def __init__(self, *, layers: int, blocks: int, block_nbytes: int) -> None:
        if block_nbytes % (layers * _WORD_NBYTES):
            raise ConfigError(
                f"a block of {block_nbytes} bytes cannot be cut into {layers} layers of whole "
                f"words: give chunks a multiple of {layers * _WORD_NBYTES} bytes per block"
            )
        words = block_nbytes // layers // _WORD_NBYTES
        self._words = [np.zeros((blocks, words), np.int64) for _ in range(layers)]
        self._places = np.arange(words, dtype=np.int64) * _STEP
        tensors = [torch.from_numpy(each).view(torch.int8) for each in self._words]
        pages = [(number, words * _WORD_NBYTES) for number in range(layers)]
        self.kv = KVBlocks(tensors, [pages])

    def fill(self, blocks: Sequence[int], seeds: Sequence[int]) -> None:
        """Fill each of ``blocks`` with the content for its seed."""
        for layer, memory in enumerate(self._words):
            for block, seed in zip(blocks, seeds, strict=True):
                np.add(self._places, _first_word(layer, seed), out=memory[block])

    def holds(self, blocks: Sequence[int], seeds: Sequence[int]) -> bool:
        """Return whether ``blocks`` have exactly the content that :meth:`fill` writes."""
        return all(
            np.array_equal(memory[block], self._places + _first_word(layer, seed))
            for layer, memory in enumerate(self._words)
            for block, seed in zip(blocks, seeds, strict=True)
        )


def _first_word(layer: int, seed: int) -> NDArray[np.int64]:
    # Arrays wrap around silently, single numbers do not.
    return np.array([seed], np.int64) + np.array([layer], np.int64) * _LAYER_STEP
