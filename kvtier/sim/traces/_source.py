"""The classes that all readers of traces use: formats, sources and the trace builder."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from array import array
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

import numpy as np

from kvtier.printable import printable
from kvtier.sim.traces._trace import Trace, TraceError

__all__ = [
    "FORMATS",
    "FORMAT_NAMES",
    "TO_UTF8",
    "Format",
    "Source",
    "TraceBuilder",
    "TraceFormat",
    "open_source",
]

TraceFormat = Literal["auto", "mooncake", "lmbench", "bailian", "keys", "oracle"]
FORMAT_NAMES: Final[tuple[str, ...]] = get_args(TraceFormat)


@dataclass(frozen=True, slots=True)
class Format:
    """A trace format, with its unit of time and its number of tokens per chunk id.

    Attributes:
        times: Description of the timestamps.
        ticks_per_s: Number of timestamp units per second.
        tokens_per_id: Number of tokens per id in the format's definition. A trace may differ.
        text_timestamp: Whether the timestamp is a string of digits.
    """

    name: str
    times: str
    ticks_per_s: float
    tokens_per_id: int
    text_timestamp: bool = False


_ROWS: Final = (
    Format("mooncake", "timestamps in milliseconds", 1e3, 512),
    Format("lmbench", "timestamps in nanoseconds", 1e9, 512, text_timestamp=True),
    Format("bailian", "timestamps in seconds", 1.0, 16),
    Format("keys", "one request per second", 1.0, 1),
    Format("oracle", "timestamps in seconds", 1.0, 1),
)
FORMATS: Final[Mapping[str, Format]] = {row.name: row for row in _ROWS}

TO_UTF8: Final = "save it as UTF-8, as with iconv -f LATIN1 -t UTF-8"
"""The remedy for text in an encoding other than UTF-8."""

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_SUFFIXES: Final = frozenset({".gz", ".zst", ".zstd"})


class Source:
    """One trace file, decompressed.

    Attributes:
        file: The path as the user gave it, for errors.
        name: The file's name without directory and suffixes, with control characters escaped.
        sha256: SHA-256 of the bytes on disk.
        content: The decompressed bytes.
    """

    def __init__(self, path: Path, raw: bytes) -> None:
        self.file = str(path)
        stem = path.name
        while Path(stem).suffix in _SUFFIXES:
            stem = Path(stem).stem
        self.name = printable(Path(stem).stem or stem)
        self.sha256 = hashlib.sha256(raw).hexdigest()
        self.content = _decompress(self.file, raw)

    def error(self, line: int, problem: str, remedy: str) -> TraceError:
        """Return an error about ``line``, for the caller to raise."""
        return TraceError(self.file, line, problem, remedy)


def open_source(path: Path) -> Source:
    """Read the file at ``path``; raise TraceError if it is missing, empty or damaged."""
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
        remedy = "install it with: pip install 'kvtier[zstd]', or decompress the file"
        problem = "compressed with zstd, which needs the package zstandard"
        raise TraceError(file, 0, problem, remedy) from error
    decompressor = zstandard.ZstdDecompressor()
    try:
        # A stream reader ends silently in the middle of a frame; a decompressor reports it.
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


class TraceBuilder:
    """Builds a trace. It takes about 8 bytes per reference and one dict entry per chunk."""

    def __init__(self, *, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        self._numbers: dict[Hashable, int] = {}
        self._ids = array("q")
        self._offsets = array("q", [0])
        self._timestamps = array("d")
        self._inputs = array("q")
        self._outputs = array("q")
        self._sessions: list[str] = []

    def add(
        self,
        ids: Iterable[Hashable],
        *,
        timestamp_s: float,
        input_tokens: int,
        output_tokens: int = 0,
        session: str = "",
    ) -> None:
        """Append one request with the chunk ids ``ids``, root to leaf."""
        numbers = self._numbers
        self._ids.extend([numbers.setdefault(key, len(numbers)) for key in ids])
        self._offsets.append(len(self._ids))
        self._timestamps.append(timestamp_s)
        self._inputs.append(input_tokens)
        self._outputs.append(output_tokens)
        self._sessions.append(session)

    def build(self, source: Source, format_name: str) -> Trace:
        """Return the trace of ``source``; raise TraceError if no request has a chunk."""
        if not self._ids:
            remedy = "check hash_ids: requests shorter than one chunk refer to none"
            raise source.error(0, "no request refers to any chunk", remedy)
        return self.finish(name=source.name, format_name=format_name, sha256=source.sha256)

    def finish(self, *, name: str, format_name: str, sha256: str) -> Trace:
        """Return the trace of all added requests. They need not come from a file."""
        timestamps = np.array(self._timestamps, dtype=np.float64)
        return Trace(
            name=name,
            format=format_name,
            sha256=sha256,
            ids=np.array(self._ids, dtype=np.int64),
            offsets=np.array(self._offsets, dtype=np.int64),
            timestamps_s=timestamps - timestamps.min(),
            input_tokens=np.array(self._inputs, dtype=np.int64),
            output_tokens=np.array(self._outputs, dtype=np.int64),
            chunk_tokens=self.chunk_tokens,
            distinct=len(self._numbers),
            sessions=tuple(self._sessions) if any(self._sessions) else (),
        )
