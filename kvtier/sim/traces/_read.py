"""Which format a file has, and reading it."""

from __future__ import annotations

import re
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
_PLAIN_KEY: Final = re.compile(rb"[\w./+=@%~\x80-\xff-]+")
"""What is taken for a key unasked: numbers, hashes, paths and names, in any language."""


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
    if start.startswith(b"{"):
        return detect_json(source)
    _require_keys(source, sample)
    return "keys"


def _require_keys(source: Source, sample: bytes) -> None:
    """Make sure that the beginning of ``source`` looks like one key a line.

    Any text is lines, and a configuration or a log read as keys would be a trace that means
    nothing. Who has keys with blanks or colons in them says so.

    Raises:
        TraceError: A line is not one plain word.
    """
    lines = sample.split(b"\n")
    if len(sample) < len(source.content) and len(lines) > 1:
        del lines[-1]  # cut off by the end of the sample
    for number, line in enumerate(lines, start=1):
        word = line.strip()
        if word and not _PLAIN_KEY.fullmatch(word):
            problem = "neither JSON of a request nor one plain word"
            remedy = "name a trace file; if every line of it is a key, add --format keys"
            raise source.error(number, problem, remedy)


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
