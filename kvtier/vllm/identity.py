"""The identity of a cache: the model and the engine's layout.

:func:`declared_identity` returns the part that is known without an engine, for ``kvtier
check``. :func:`fingerprint` adds the part that only an engine knows, such as the layout of its
KV cache.

A local model is identified by its files. Files with settings are read whole. Weight files are
too large for that, and their sizes and dates do not suffice: fine-tunes of one architecture
have equal sizes, and files in reproducibly built container images have equal dates. So some
blocks of every weight file are read; training changes at least some of these blocks. The number
of blocks is fixed, because the next start must read the same blocks.

In a Hugging Face cache, a weight file is a link to a blob that is named by its SHA-256. That
name replaces the date, so a copy of the cache keeps the identity.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.config import KvtierConfig, variable
from kvtier.errors import ConfigError
from kvtier.printable import printable
from kvtier.types import LayoutFingerprint

if TYPE_CHECKING:
    from kvtier.memory import RegionGeometry
    from kvtier.vllm.engine import EngineFacts

__all__ = ["ModelFiles", "declared_identity", "fingerprint", "model_files", "model_identity"]

_FORMAT: Final = "kvtier-vllm-3"
"""Version of a slot's layout: increment it when the layout changes."""
_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_READ_NBYTES: Final = 64 << 20
"""Largest size of files that are read as a whole."""
_BLOCK_NBYTES: Final = 64 << 10
_BLOCKS: Final = 256
"""Number of blocks to read from all files together, but at least ``_LEAST_BLOCKS`` per file."""
_LEAST_BLOCKS: Final = 3
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_THREADS: Final = 32
"""Number of concurrent reads; each waits for a disk or a network."""
_GOLDEN: Final = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio. The multiples of this number modulo 2**64 are spread
evenly, and do not follow the distances between a model's layers."""


def declared_identity(config: KvtierConfig, model: str | None) -> dict[str, str | int]:
    """Return the identity's fields that are known before an engine starts.

    Args:
        config: The configuration.
        model: The model's path or name; None to leave out the fields of the model.

    Raises:
        ConfigError: The model's files cannot be examined.
    """
    identity = config.identity
    fields: dict[str, str | int] = {
        "format": _FORMAT,
        "model_revision": identity.model_revision or "",
        "weights_epoch": identity.weights_epoch,
        "blocks_per_chunk": config.engine.blocks_per_chunk,
        "hash_seed": variable("PYTHONHASHSEED") or "",
    }
    if model is not None:
        fields.update(model_identity(model))
    if identity.name is not None:
        fields["model"] = identity.name
    return fields


def model_identity(model: str) -> dict[str, str]:
    """Return the fields of the identity that depend only on the model.

    Args:
        model: The model's path or name.

    Raises:
        ConfigError: The model's files cannot be examined.
    """
    try:
        files = model_files(Path(model))
        name = "" if files.has_weights else _canonical(model)
    except OSError as error:  # its name is too long, it vanished, or permission is missing
        problem = f"{printable(str(error.filename or model))}: {error.strerror}"
        remedy = "run this as the user that runs the engine"
        raise ConfigError(f"model {problem}; {remedy}") from error
    return {"model": name, "model_files": files.digest}


def _canonical(model: str) -> str:
    """Return ``model`` as a resolved path if it is local; else unchanged."""
    return str(Path(model).resolve()) if Path(model).exists() else model


def fingerprint(
    engine: EngineFacts, config: KvtierConfig, geometry: RegionGeometry
) -> LayoutFingerprint:
    """Return the full identity: all values on which a chunk's bytes depend, except its key."""
    groups = ";".join(f"{tokens}:{','.join(layers)}" for tokens, layers in engine.groups)
    if engine.group_ids != tuple(range(len(engine.groups))):
        # Keys end with these numbers, so another group before them changes the meaning of all.
        groups += f";{','.join(map(str, engine.group_ids))}"
    return LayoutFingerprint(
        {
            **declared_identity(config, engine.model_name),
            "kv_dtype": engine.kv_dtype,
            "kv_layout": engine.kv_layout,
            "kv_content": geometry.content,
            "groups": hashlib.sha256(groups.encode()).hexdigest()[:16],
            "tokens_per_hash": engine.tokens_per_hash,
            "ranks": "any" if geometry.is_portable else geometry.ranks,
            "block_nbytes": geometry.block_nbytes,
        },
        label=config.identity.name or engine.model_name,
    )


class ModelFiles(NamedTuple):
    """The identity of a local model's files.

    Attributes:
        digest: Digest of the files with settings, and of each weight file's size, samples, and
            date or SHA-256. Empty for a remote model.
        has_weights: Whether the digest covers weights. If True, the identity does not need the
            model's path.
    """

    digest: str
    has_weights: bool


def model_files(model: Path) -> ModelFiles:
    """Return the identity of a local model's files, which does not depend on their path.

    Args:
        model: A directory, a file such as a GGUF, or the name of a remote model.
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
    """Return the file's path, its size and version as text, and the ranges to read.

    Args:
        path: The file.
        first: Number of the file's first block, counted over all files.
        blocks: Number of blocks to read if the file is large.
    """
    found = path.stat()
    if path.suffix == ".json" and found.st_size <= _READ_NBYTES:
        return path, str(found.st_size), [(0, found.st_size)]
    status = f"{found.st_size}:{_blob(path) or found.st_mtime_ns}"
    return path, status, list(_samples(found.st_size, first, blocks))


def _blob(path: Path) -> str:
    """Return the SHA-256 that names a file in a Hugging Face cache; "" for other files."""
    blob = path.resolve()
    is_blob = blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name)
    return blob.name if is_blob else ""


def _samples(nbytes: int, first: int, blocks: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of the blocks to read: all, or the first, the last and others."""
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
    """Return the digest of some bytes of a file, or the error number after a failure."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return hashlib.sha256(os.pread(descriptor, nbytes, start)).digest()
        finally:
            os.close(descriptor)
    except OSError as error:
        return str(error.errno).encode()
