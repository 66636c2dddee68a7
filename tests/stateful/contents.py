"""What every block and every slot should hold, byte by byte.

That follows from a chunk's key and the *epoch*, which every reset of the cache ends: from then
on the same tokens mean other bytes, as with other weights. Each rank has bytes of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from kvtier.keys import ChunkKey, make_key
from kvtier.memory.paged import PagedMemory
from kvtier.replay._requests import ReplayRequest

BLOCK_TOKENS, BLOCKS_PER_CHUNK, LAYERS = 4, 2, 2
BLOCK_NBYTES = LAYERS * 2 * 8
STRIPE_NBYTES = BLOCKS_PER_CHUNK * BLOCK_NBYTES
_EPOCH_STEP, _RANK_STEP, _MASK = 0x1234567, 0x76543210F, (1 << 62) - 1


class Contents:
    """The bytes of one engine's chunks.

    Args:
        ranks: Workers of the engine, each with a memory of its own.
        blocks: Blocks of each memory.

    Attributes:
        memories: The workers' KV memory.
        names: What the blocks of each chunk are called that a request ever had.
    """

    def __init__(self, *, ranks: int, blocks: int) -> None:
        self.memories = [make_memory(blocks) for _ in range(ranks)]
        self.names: dict[ChunkKey, Sequence[int]] = {}
        self._wanted: dict[tuple[ChunkKey, int], bytes] = {}

    def learn(self, request: ReplayRequest) -> None:
        """Note the chunks of a request."""
        hashes = request.block_hashes
        for end in range(BLOCKS_PER_CHUNK, len(hashes) + 1, BLOCKS_PER_CHUNK):
            blocks = range(end - BLOCKS_PER_CHUNK, end)
            self.names[make_key(hashes[end - 1], 0)] = [request.seed(at) for at in blocks]

    def name(self, request: ReplayRequest, block: int, epoch: int) -> int:
        """Return what a block of a request holds in an epoch, and no other block ever does."""
        if block < len(request.block_hashes):
            return request.seed(block) + _EPOCH_STEP * epoch & _MASK
        text = f"{request.request_id}/{block}/{request.num_tokens}/{epoch}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")

    def fill(self, block: int, name: int) -> None:
        """Compute a block in every rank."""
        for rank, memory in enumerate(self.memories):
            memory.fill([block], [_seed(name, rank)])

    def holds(self, block: int, name: int) -> bool:
        """Return whether a block holds in every rank what it should."""
        return all(
            memory.holds([block], [_seed(name, rank)])
            for rank, memory in enumerate(self.memories)
        )

    def wanted(self, key: ChunkKey, epoch: int) -> bytes:
        """Return all bytes of a chunk's slot."""
        if (key, epoch) not in self._wanted:
            names = [name + _EPOCH_STEP * epoch & _MASK for name in self.names[key]]
            self._wanted[key, epoch] = b"".join(_stripes(names, len(self.memories)))
        return self._wanted[key, epoch]

    @property
    def tensors(self) -> Sequence[Mapping[str, object]]:
        return [memory.tensors for memory in self.memories]


def make_memory(blocks: int) -> PagedMemory:
    return PagedMemory(layers=LAYERS, blocks=blocks, block_nbytes=BLOCK_NBYTES)


def _seed(name: int, rank: int) -> int:
    return name + _RANK_STEP * rank & _MASK


def _stripes(names: Sequence[int], ranks: int) -> Iterable[bytes]:
    """Yield what each rank has of a chunk: block after block, layer after layer."""
    memory = make_memory(blocks=1)
    for rank in range(ranks):
        for name in names:
            memory.fill([0], [_seed(name, rank)])
            yield from (bytes(layer[0].numpy()) for layer in memory.tensors.values())
