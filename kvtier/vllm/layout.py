"""What vLLM's configuration means in kvtier's terms."""

from __future__ import annotations

import hashlib
from itertools import chain
from pathlib import Path

from kvtier.config import KvtierConfig, check_chunk_fits, environment
from kvtier.errors import ConfigError, UnsupportedError
from kvtier.memory import RegionGeometry
from kvtier.types import LayoutFingerprint
from kvtier.vllm.compat import EngineFacts, hashes_are_seeded_at_random

__all__ = [
    "block_hashes_are_stable",
    "fingerprint",
    "require_supported_layout",
]

_FORMAT = "kvtier-vllm-2"
"""Raised when the bytes of a slot are laid out differently."""

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_READ_NBYTES = 1 << 20
"""Settings up to this size are read; a tokenizer's vocabulary may be larger."""


def require_supported_layout(engine: EngineFacts, config: KvtierConfig) -> None:
    """Refuse what kvtier cannot store correctly, before anything is allocated.

    Raises:
        UnsupportedError: A parallelism or layout kvtier does not support.
        ConfigError: The engine was started with another chunk size than the file says, or a
            tier is smaller than a chunk.
    """
    if engine.pp_size > 1 or engine.pcp_size > 1 or engine.dcp_size > 1:
        raise UnsupportedError(
            "kvtier supports tensor parallelism only; pipeline and context parallel sizes "
            f"are {engine.pp_size}, {engine.pcp_size} and {engine.dcp_size}"
        )
    if engine.canonical_layout:
        raise UnsupportedError("kvtier does not support canonical_layout: remove it")
    if engine.worker_kv_bytes_per_block <= 0:
        raise UnsupportedError("the engine has no KV cache to offload")
    if engine.blocks_per_chunk != config.engine.blocks_per_chunk:
        raise ConfigError(
            f"engine.blocks_per_chunk is {config.engine.blocks_per_chunk} in the file but "
            f"vLLM was started with {engine.blocks_per_chunk}: start it with what "
            "`kvtier vllm-args` prints"
        )
    # What a chunk has at least: one worker's part. The workers know the rest, and check it.
    check_chunk_fits(config, engine.worker_kv_bytes_per_block * engine.blocks_per_chunk)


def fingerprint(
    engine: EngineFacts, config: KvtierConfig, geometry: RegionGeometry
) -> LayoutFingerprint:
    """Return everything stored bytes depend on besides the tokens, which the keys name."""
    groups = ";".join(f"{tokens}:{','.join(layers)}" for tokens, layers in engine.groups)
    return LayoutFingerprint(
        {
            "format": _FORMAT,
            "model": engine.model_name,
            "model_files": _model_files(Path(engine.model_name)),
            "model_revision": config.identity.model_revision or "",
            "weights_epoch": config.identity.weights_epoch,
            "kv_dtype": engine.kv_dtype,
            "kv_layout": engine.kv_layout or "",
            "kv_content": geometry.content,
            "groups": hashlib.sha256(groups.encode()).hexdigest()[:16],
            "tokens_per_hash": engine.tokens_per_hash,
            "blocks_per_chunk": engine.blocks_per_chunk,
            "ranks": "any" if geometry.is_portable else geometry.ranks,
            "stripes": geometry.stripes,
            "stripe_nbytes": geometry.stripe_nbytes,
            "hash_seed": environment().python_hash_seed or "",
        }
    )


def block_hashes_are_stable() -> bool:
    """Return whether a restarted engine will give the same tokens the same keys.

    vLLM seeds its block hashes while the engine starts, after its connectors are built, so this
    is to be asked when the first request arrives.
    """
    return environment().python_hash_seed is not None or not hashes_are_seeded_at_random()


def _model_files(model: Path) -> str:
    """Return a digest of a local model: what its settings say, its weights' sizes and dates.

    A model that is nothing local is identified by its name, ``identity.model_revision`` and
    ``identity.weights_epoch`` alone: vLLM does not tell an offloading spec more.

    Args:
        model: A directory, or a file as GGUF's.
    """
    if model.is_file():
        named = {model.name: model}
    elif model.is_dir():
        weights = (path for path in model.rglob("*") if path.suffix in _WEIGHTS)
        found = filter(Path.is_file, chain(model.glob("*.json"), weights))
        named = {str(path.relative_to(model)): path for path in found}
    else:
        return ""
    digest = hashlib.sha256()
    for name, path in sorted(named.items()):
        digest.update(f"{name}:{_state(path)}\n".encode())
    return digest.hexdigest()[:16]


def _state(path: Path) -> str:
    """Return what tells a file from another one of its name."""
    status = path.stat()
    if path.suffix == ".json" and status.st_size < _READ_NBYTES:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{status.st_size}:{status.st_mtime_ns}"
