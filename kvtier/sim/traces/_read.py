"""Which format a file has, and reading it."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, get_args

from kvtier.sim.traces._flat import RECORD_NBYTES, read_keys, read_oracle
from kvtier.sim.traces._jsonl import detect_json, read_json
from kvtier.sim.traces._source import Source, open_source
from kvtier.sim.traces._trace import Trace

__all__ = ["FORMATS", "TraceFormat", "read_trace"]

TraceFormat = Literal["auto", "mooncake", "lmbench", "bailian", "keys", "oracle"]
FORMATS: Final[tuple[str, ...]] = get_args(TraceFormat)

_SAMPLE_NBYTES: Final = 1 << 16


def read_trace(path: Path | str, *, format_name: TraceFormat = "auto") -> Trace:
    """Read the trace at ``path``, plain or compressed with gzip or zstd.

    Args:
        path: The file.
        format_name: Its format; ``auto`` looks at the content, never at the name.

    Raises:
        TraceError: It cannot be read; the message names the line and a remedy.
    """
    source = open_source(Path(path))
    name = _detect(source) if format_name == "auto" else format_name
    if name == "keys":
        return read_keys(source)
    if name == "oracle":
        return read_oracle(source)
    return read_json(source, name)


def _detect(source: Source) -> str:
    sample = source.content[:_SAMPLE_NBYTES]
    if _is_binary(sample):
        if len(source.content) % RECORD_NBYTES:
            problem = f"binary, and its size is no multiple of {RECORD_NBYTES} bytes"
            raise source.error(0, problem, "name its format with --format, or it is damaged")
        return "oracle"
    start = sample.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"["):
        remedy = "write JSON Lines: one request a line, no list around them"
        raise source.error(1, "a JSON list", remedy)
    return detect_json(source) if start.startswith(b"{") else "keys"


def _is_binary(sample: bytes) -> bool:
    """Return whether ``sample`` holds what text does not."""
    if b"\0" in sample:
        return True
    try:
        sample.decode("utf-8")
    except UnicodeDecodeError as error:
        # A character cut off by the end of the sample is no sign of anything.
        return error.start < len(sample) - 3
    return False
