"""A trace file's bytes, whatever they are compressed with."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path
from typing import Final

from kvtier.sim.traces._trace import TraceError

__all__ = ["TO_UTF8", "Source", "open_source"]

TO_UTF8: Final = "save it as UTF-8, as with iconv -f LATIN1 -t UTF-8"
"""Remedy for text in another encoding."""

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_SUFFIXES: Final = frozenset({".gz", ".zst", ".zstd"})


class Source:
    """One trace file, decompressed.

    Attributes:
        file: What errors call it: the path as given.
        name: The file's name without directory and suffixes.
        sha256: Of the bytes on disk.
        content: The decompressed bytes.
    """

    def __init__(self, path: Path, raw: bytes) -> None:
        self.file = str(path)
        stem = path.name
        while Path(stem).suffix in _SUFFIXES:
            stem = Path(stem).stem
        self.name = Path(stem).stem or stem
        self.sha256 = hashlib.sha256(raw).hexdigest()
        self.content = _decompress(self.file, raw)

    def error(self, line: int, problem: str, remedy: str) -> TraceError:
        """Return an error at ``line``, to be raised."""
        return TraceError(self.file, line, problem, remedy)


def open_source(path: Path) -> Source:
    """Read the file at ``path``.

    Raises:
        TraceError: It is not there, cannot be read, is empty, or is damaged compressed data.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise TraceError(str(path), 0, "no such file", "check the path") from error
    except IsADirectoryError as error:
        raise TraceError(str(path), 0, "is a directory", "name a file in it") from error
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise TraceError(str(path), 0, problem, "check its permissions") from error
    source = Source(path, raw)
    if not source.content.strip():
        raise source.error(0, "empty", "name a file with at least one request")
    return source


def _decompress(file: str, raw: bytes) -> bytes:
    if raw.startswith(_GZIP):
        try:
            return gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            problem = f"damaged gzip data ({error})"
            raise TraceError(file, 0, problem, "compress or download it again") from error
    if raw.startswith(_ZSTD):
        return _decompress_zstd(file, raw)
    return raw


def _decompress_zstd(file: str, raw: bytes) -> bytes:
    try:
        import zstandard  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        remedy = "install it with: pip install 'kvtier[traces]', or decompress the file"
        problem = "compressed with zstd, which needs the package zstandard"
        raise TraceError(file, 0, problem, remedy) from error
    decompressor = zstandard.ZstdDecompressor()
    try:
        # A stream reader ends silently in the middle of a frame; the object form knows.
        pieces = []
        left = raw
        while left:
            frame = decompressor.decompressobj()
            pieces.append(frame.decompress(left))
            if not frame.eof:
                remedy = "compress or download it again"
                raise TraceError(file, 0, "zstd data ends too early", remedy)
            left = frame.unused_data
    except zstandard.ZstdError as error:
        problem = f"damaged zstd data ({error})"
        raise TraceError(file, 0, problem, "compress or download it again") from error
    return b"".join(pieces)
