"""Parses capacities and chunk sizes on the command line."""

from __future__ import annotations

from decimal import Decimal
from typing import Final

from kvtier.errors import ConfigError
from kvtier.sim.traces import Trace
from kvtier.units import UnitError, parse_percentage, parse_size

__all__ = ["NBYTES_PER_TOKEN", "chunk_nbytes", "parse_capacity", "parse_chunk_bytes"]

NBYTES_PER_TOKEN: Final = 128 << 10
"""Default number of KV bytes of a token, as in an 8B model with GQA and 16-bit KV."""


def chunk_nbytes(trace: Trace) -> int:
    """Return the default size in bytes of one chunk of a trace."""
    return trace.chunk_tokens * NBYTES_PER_TOKEN


def parse_chunk_bytes(text: str) -> int:
    """Parse a chunk size such as ``2MiB`` or ``2097152``; return the number of bytes."""
    plain = text.strip()
    if plain.isascii() and plain.isdecimal():
        nbytes = int(plain)
    else:
        try:
            nbytes = parse_size(plain)
        except UnitError as error:
            raise ConfigError(f"--chunk-bytes {text}: {error}") from error
    if not nbytes:
        raise ConfigError(f"--chunk-bytes {text}: must be above 0, such as 2MiB")
    return nbytes


def parse_capacity(text: str, *, distinct: int, chunk_bytes: int) -> int:
    """Parse a capacity; return the number of chunks.

    ``text`` is a share of the trace's ``distinct`` chunks (``5%``), a number of chunks
    (``9140``) or a size (``64GiB``). Any other text, and less than a chunk, is a ConfigError.

    >>> [
    ...     parse_capacity(text, distinct=200, chunk_bytes=1 << 20)
    ...     for text in ("5%", "7", "1GiB")
    ... ]
    [10, 7, 1024]
    """
    plain = text.strip()
    try:
        if plain.endswith("%"):
            share = Decimal(repr(parse_percentage(plain)))
            remedy = f"1 of the trace's {distinct} chunks is {100 / distinct:.2g}%: write more"
            return _positive(text, int(share * distinct + Decimal("0.5")), remedy)
        if plain.isascii() and plain.isdecimal():
            return _positive(text, int(plain), "write at least 1 chunk")
        chunks = parse_size(plain) // chunk_bytes
    except UnitError as error:
        remedy = "write a share of the trace (5%), chunks (9140) or a size (64GiB)"
        raise ConfigError(f"capacity {text}: {error.problem}; {remedy}") from error
    return _positive(text, chunks, f"a chunk takes {chunk_bytes} bytes: write more")


def _positive(text: str, chunks: int, remedy: str) -> int:
    if chunks < 1:
        raise ConfigError(f"capacity {text}: holds no chunk; {remedy}")
    return chunks
