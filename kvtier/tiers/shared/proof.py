"""The proof of a value in a shared tier. An engine verifies the value's bytes by the proof.

A service may return the bytes of another key, a fragment of a value, or damaged bytes. The
proof is stored after the chunk's bytes. It consists of a hash of the value's full key, the
number of bytes, and a hash of the bytes. The full key contains the layout's fingerprint and the
epoch. A value without a matching proof is a miss.

A proof detects accidents, not attacks: every writer to the service can make proofs.
"""

from __future__ import annotations

import struct
from typing import Final

import xxhash

__all__ = ["PROOF_NBYTES", "is_proof_of", "make_proof"]

PROOF_NBYTES: Final = 64
"""Number of bytes of a proof."""

_MAGIC: Final = b"kvtier proof v1\0"
_PROOF: Final = struct.Struct("<16s16sQ8x16s")
assert _PROOF.size == PROOF_NBYTES


def make_proof(key: str, payload: memoryview) -> bytes:
    """Return the proof for the service's key ``key`` and the chunk's bytes ``payload``."""
    digest = xxhash.xxh3_128_digest
    return _PROOF.pack(_MAGIC, digest(key.encode()), payload.nbytes, digest(payload))


def is_proof_of(proof: memoryview, key: str, payload: memoryview) -> bool:
    """Return whether ``proof`` is the proof for ``key`` and the bytes ``payload``."""
    return proof == make_proof(key, payload)
