"""What is moved: how much, in which units, under which keys."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.keys import ChunkKey, make_key

__all__ = [
    "CHUNK_SIZES",
    "REQUEST_NBYTES",
    "Request",
    "Workload",
    "make_request",
    "shuffled",
]

CHUNK_SIZES = (128 << 10, 512 << 10, 2 << 20)
REQUEST_NBYTES = 64_000_000


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: the keys of its chunks, root first.

    Attributes:
        req_id: Unique in a run.
        keys: The keys.
    """

    req_id: str
    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of one pass.

    Attributes:
        chunk_nbytes: Bytes of a chunk, a multiple of the page size.
        working_set_nbytes: Bytes of all requests together, about.
        ram_nbytes: Bytes of the RAM tier.
    """

    chunk_nbytes: int
    working_set_nbytes: int
    ram_nbytes: int

    @property
    def chunks_per_request(self) -> int:
        """Chunks of a request of 64 MB, rounded down."""
        return max(REQUEST_NBYTES // self.chunk_nbytes, 1)

    @property
    def requests(self) -> int:
        """Whole requests in the working set."""
        return max(self.working_set_nbytes // self.request_nbytes, 1)

    @property
    def request_nbytes(self) -> int:
        """Bytes of one request."""
        return self.chunks_per_request * self.chunk_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all requests."""
        return self.requests * self.request_nbytes

    @property
    def chunks(self) -> int:
        """Chunks of all requests."""
        return self.requests * self.chunks_per_request

    def window(self, share: float) -> int:
        """Return how many requests fit a share of RAM side by side."""
        return max(int(share * self.ram_nbytes) // self.request_nbytes, 1)

    def generation(self, number: int) -> list[Request]:
        """Return the requests of the working set's version ``number``."""
        return [
            make_request(f"{number}.{request}", self.chunks_per_request)
            for request in range(self.requests)
        ]

    def ragged_generation(self, number: int, draw: random.Random) -> list[Request]:
        """Return requests of random lengths that fill the working set once."""
        left = self.chunks
        made: list[Request] = []
        while left:
            chunks = min(left, draw.randint(1, 2 * self.chunks_per_request - 1))
            made.append(make_request(f"{number}.{len(made)}r", chunks))
            left -= chunks
        return made


def make_request(name: str, chunks: int) -> Request:
    """Return the request ``name``; equal names have equal keys."""
    keys = (hashlib.sha256(f"{name}.{depth}".encode()).digest() for depth in range(chunks))
    return Request(name, tuple(make_key(block_hash, 0) for block_hash in keys))


def shuffled(requests: Sequence[Request], seed: int) -> list[Request]:
    """Return ``requests`` in the random order of ``seed``."""
    return random.Random(seed).sample(requests, len(requests))
