"""What tells a local model from another one at the same path.

All settings are read. Weights are too large for that, and their sizes and dates do not
suffice: fine-tunes of one architecture have equal sizes, and images that are built
reproducibly equal dates. So of every weight file blocks are read that lie all over it. Training
changes some of them, unless it changes next to nothing.

The number of blocks is bounded and not the time, because the next start has to read the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["ModelFiles", "model_files"]

_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_READ_NBYTES: Final = 64 << 20
"""Settings up to this size are read as a whole."""
_BLOCK_NBYTES: Final = 64 << 10
_BLOCKS: Final = 256
"""Blocks of all weights together, unless there are so many files that each has its least."""
_LEAST_BLOCKS: Final = 3
_THREADS: Final = 32
"""Reads at a time; each waits for a disk, or for another machine."""
_GOLDEN: Final = 0x9E3779B97F4A7C15
"""Multiples of it, modulo 2**64, lie evenly in all and in no step with a model's layers."""


class ModelFiles(NamedTuple):
    """What identifies a local model.

    Attributes:
        digest: Of its settings, and its weights' sizes, dates and samples; empty if the model
            is not local.
        has_weights: Whether weights are in the digest, so that the path need not be.
    """

    digest: str
    has_weights: bool


def model_files(model: Path) -> ModelFiles:
    """Return what identifies a local model, wherever it is.

    Args:
        model: A directory, a file such as a GGUF, or the name of a model that is not local.
    """
    if model.is_file():
        named = {f"model{model.suffix}": model}
    elif model.is_dir():
        weights = (path for path in model.rglob("*") if path.suffix in _WEIGHTS)
        found = filter(Path.is_file, chain(model.glob("*.json"), weights))
        named = {str(path.relative_to(model)): path for path in found}
    else:
        return ModelFiles("", has_weights=False)
    blocks = max(_LEAST_BLOCKS, _BLOCKS // max(1, len(named)))
    names = sorted(named)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="kvtier-model") as threads:
        plans = threads.map(
            lambda number: _plan(named[names[number]], number * blocks, blocks),
            range(len(names)),
        )
        reads = [
            (status, [threads.submit(_read, path, *part) for part in parts])
            for path, status, parts in plans
        ]
    digest = hashlib.sha256()
    for name, (status, read) in zip(names, reads, strict=True):
        digest.update(f"{name}:{status}\n".encode())
        for part in read:
            digest.update(part.result())
    has_weights = any(path.suffix in _WEIGHTS for path in named.values())
    return ModelFiles(digest.hexdigest()[:16], has_weights)


def _plan(path: Path, first: int, blocks: int) -> tuple[Path, str, list[tuple[int, int]]]:
    """Return a file, its size, its date unless it has settings, and the parts of it to read.

    Args:
        path: The file.
        first: Number of its first block, counted over all files.
        blocks: How many blocks to read of a large one.
    """
    found = path.stat()
    if path.suffix == ".json" and found.st_size <= _READ_NBYTES:
        return path, str(found.st_size), [(0, found.st_size)]
    status = f"{found.st_size}:{found.st_mtime_ns}"
    return path, status, list(_samples(found.st_size, first, blocks))


def _samples(nbytes: int, first: int, blocks: int) -> Iterator[tuple[int, int]]:
    """Yield where blocks of a file begin and how long they are: both ends, and in between."""
    last = nbytes - _BLOCK_NBYTES
    if nbytes <= blocks * _BLOCK_NBYTES:
        for start in range(0, nbytes, _BLOCK_NBYTES):
            yield start, _BLOCK_NBYTES
        return
    yield 0, _BLOCK_NBYTES
    yield last, _BLOCK_NBYTES
    for number in range(first + 1, first + blocks - 1):
        yield (number * _GOLDEN % (1 << 64)) * last >> 64, _BLOCK_NBYTES


def _read(path: Path, start: int, nbytes: int) -> bytes:
    """Return a digest of part of a file; of one that cannot be read, that it cannot."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return hashlib.sha256(os.pread(descriptor, nbytes, start)).digest()
        finally:
            os.close(descriptor)
    except OSError as error:
        return str(error.errno).encode()
