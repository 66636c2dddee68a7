"""What every block and every slot should hold, byte by byte.

That follows from the tokens before it, its KV cache group and the *epoch*, which every reset of
the cache ends: from then on the same tokens mean other bytes, as with other weights. Each rank
has bytes of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from kvtier.connector.groups import GroupLayout
from kvtier.keys import ChunkKey, make_key
from kvtier.memory.copy import KVBlocks
from kvtier.memory.paged import PagedMemory

LAYERS = 2
BLOCK_NBYTES = LAYERS * 2 * 8
_EPOCH_STEP, _RANK_STEP, _MASK = 0x1234567, 0x76543210F, (1 << 62) - 1


def block_name(group: int, tokens: Sequence[int], epoch: int) -> int:
    """Return what a block of ``group`` holds whose last computed token ends ``tokens``."""
    digest = hashlib.blake2b(repr((group, *tokens)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") + _EPOCH_STEP * epoch & _MASK


class Contents:
    """The bytes of one engine's blocks and chunks.

    Args:
        ranks: Workers of the engine, each with a memory of its own.
        blocks: Blocks of each memory.
        layouts: The engine's KV cache groups, which share the blocks.

    Attributes:
        kv: The workers' KV memory.
    """

    def __init__(self, *, ranks: int, blocks: int, layouts: Sequence[GroupLayout]) -> None:
        self._memories = [_make_memory(blocks) for _ in range(ranks)]
        self._layouts = layouts
        self._prefixes: dict[ChunkKey, tuple[GroupLayout, Sequence[int]]] = {}
        self._wanted: dict[tuple[ChunkKey, int], bytes] = {}
        self.kv = [
            KVBlocks(memory.kv.tensors, list(memory.kv.groups) * len(layouts))
            for memory in self._memories
        ]

    def learn(self, tokens: Sequence[int], hashes: Sequence[bytes], hash_tokens: int) -> None:
        """Note the chunks of a request, of which ``hashes`` are the block hashes."""
        for layout in self._layouts:
            step = layout.hashes_per_chunk
            for end in range(step, len(hashes) + 1, step):
                key = make_key(hashes[end - 1], layout.index)
                self._prefixes.setdefault(key, (layout, tuple(tokens[: end * hash_tokens])))

    def fill(self, block: int, name: int) -> None:
        """Compute a block in every rank."""
        for rank, memory in enumerate(self._memories):
            memory.fill([block], [_seed(name, rank)])

    def holds(self, block: int, name: int) -> bool:
        """Return whether a block holds in every rank what it should."""
        return all(
            memory.holds([block], [_seed(name, rank)])
            for rank, memory in enumerate(self._memories)
        )

    def end_tokens(self, key: ChunkKey) -> int:
        """Return after how many tokens the chunk ends that ``key`` names."""
        return len(self._prefixes[key][1])

    def wanted(self, key: ChunkKey, epoch: int) -> bytes:
        """Return all bytes of a chunk's slot."""
        if (key, epoch) not in self._wanted:
            layout, tokens = self._prefixes[key]
            size = layout.group.tokens_per_block
            ends = range(len(tokens) - layout.tokens_per_chunk + size, len(tokens) + 1, size)
            names = [block_name(layout.index, tokens[:end], epoch) for end in ends]
            self._wanted[key, epoch] = b"".join(_places(names, len(self._memories)))
        return self._wanted[key, epoch]


def _make_memory(blocks: int) -> PagedMemory:
    return PagedMemory(layers=LAYERS, blocks=blocks, block_nbytes=BLOCK_NBYTES)


def _seed(name: int, rank: int) -> int:
    return name + _RANK_STEP * rank & _MASK


def _places(names: Sequence[int], ranks: int) -> Iterable[bytes]:
    """Yield the pages of a chunk: block after block, layer after layer, rank after rank."""
    memory = _make_memory(blocks=ranks)
    for name in names:
        memory.fill(range(ranks), [_seed(name, rank) for rank in range(ranks)])
        yield from (bytes(layer.numpy()) for layer in memory.kv.tensors)
