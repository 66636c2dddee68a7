"""Computes the same hashes of a prompt's blocks as vLLM, without importing vLLM.

vLLM hashes each block together with the hash of the preceding block, so a hash identifies the
whole prefix. ``tests/integration/test_warm_up.py`` compares these hashes with vLLM's own.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from kvtier.errors import ConfigError

__all__ = ["ALGORITHMS", "DEFAULT_ALGORITHM", "BlockHasher", "Scope"]

DEFAULT_ALGORITHM: Final = "sha256"
"""vLLM's default for ``--prefix-caching-hash-algo``."""

_DEFAULT_SEED: Final = "vllm-none-hash"
"""The hash that precedes the first block if ``PYTHONHASHSEED`` is not set."""


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _cbor(value: object) -> bytes:
    return _cbor2_dumps()(value, canonical=True)


@functools.cache
def _cbor2_dumps() -> Callable[..., bytes]:
    try:
        dumps: Callable[..., bytes] = importlib.import_module("cbor2").dumps
    except ImportError as error:
        remedy = "install it with: pip install cbor2"
        problem = "hashes of --prefix-caching-hash-algo with cbor need the package cbor2"
        raise ConfigError(f"{problem}; {remedy}") from error
    return dumps


ALGORITHMS: Final[dict[str, tuple[Callable[[object], bytes], Callable[[bytes], bytes]]]] = {
    "sha256": (_pickled, _sha256),
    "sha256_cbor": (_cbor, _sha256),
    "xxhash": (_pickled, xxhash.xxh3_128_digest),
    "xxhash_cbor": (_cbor, xxhash.xxh3_128_digest),
}
"""vLLM's hash algorithms: for each, a function to serialize values and one to hash bytes."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Values, other than tokens, that must be equal for two prompts to share blocks.

    Attributes:
        lora: Name of the LoRA adapter; empty for none.
        lora_path: Path of the adapter, as in the engine's arguments.
        cache_salt: Salt that vLLM hashes together with the first block; empty for none.
    """

    lora: str = ""
    lora_path: str = ""
    cache_salt: str = ""

    def extra_keys(self, *, is_first: bool) -> tuple[Any, ...] | None:
        """Return the values that vLLM hashes together with the tokens of a block."""
        keys: list[tuple[str, ...]] = []
        if self.lora:
            keys.append(("lora", self.lora, self.lora_path))
        if self.cache_salt and is_first:
            keys.append(("cache_salt", self.cache_salt))
        return tuple(keys) or None


class BlockHasher:
    """Hashes the blocks of prompts; consecutive prompts reuse hashes of their common prefix.

    Args:
        tokens_per_hash: Number of tokens between two consecutive hashes.
        algorithm: One of :data:`ALGORITHMS`.
        seed: The engine's ``PYTHONHASHSEED``; empty if it has none.

    Raises:
        ConfigError: A package is missing. Or vLLM's hashes depend on a random seed, and so
            change at every start.
    """

    def __init__(
        self, tokens_per_hash: int, *, algorithm: str = DEFAULT_ALGORITHM, seed: str = ""
    ) -> None:
        if algorithm.startswith("xxhash") and not seed:
            raise ConfigError(
                f"--prefix-caching-hash-algo {algorithm}: without PYTHONHASHSEED the hashes "
                "differ at every start, so nothing stored is found again; set PYTHONHASHSEED"
            )
        self._size = tokens_per_hash
        self._to_bytes, self._digest = ALGORITHMS[algorithm]
        self._root = self._hash(seed or _DEFAULT_SEED)
        self._scope = Scope()
        self._tokens: Sequence[int] = ()
        self._hashes: list[bytes] = []

    def hashes(self, tokens: Sequence[int], scope: Scope = Scope()) -> list[bytes]:
        """Return the hash of every whole block of a prompt, first block first."""
        size, found = self._size, self._common(tokens, scope)
        extra = scope.extra_keys(is_first=False)
        for start in range(len(found) * size, len(tokens) - size + 1, size):
            first = scope.extra_keys(is_first=True) if not start else extra
            parent = found[-1] if found else self._root
            found.append(self._hash((parent, tuple(tokens[start : start + size]), first)))
        self._scope, self._tokens, self._hashes = scope, tokens, found
        return list(found)

    def _common(self, tokens: Sequence[int], scope: Scope) -> list[bytes]:
        """Return the hashes of the blocks that ``tokens`` and the previous prompt share."""
        if scope != self._scope:
            return []
        size, shared = self._size, 0
        while shared < len(self._hashes) and (
            self._tokens[shared * size : (shared + 1) * size]
            == tokens[shared * size : (shared + 1) * size]
        ):
            shared += 1
        return self._hashes[:shared]

    def _hash(self, value: object) -> bytes:
        return self._digest(self._to_bytes(value))
