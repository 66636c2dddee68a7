"""Detects the format of a trace file and reads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvtier.sim.traces._flat import RECORD_NBYTES, read_keys, read_oracle
from kvtier.sim.traces._jsonl import detect_json, read_json
from kvtier.sim.traces._source import FORMATS, Source, TraceFormat, open_source
from kvtier.sim.traces._trace import Trace

__all__ = ["read_trace"]

_SAMPLE_NBYTES: Final = 1 << 16
_PLAIN_KEY: Final = re.compile(rb"[\w./+=@%~\x80-\xff-]+")
"""Matches keys that need no ``--format``: numbers, hashes, paths and names in any language."""


_FLAT: Final[Mapping[str, Callable[[Source, int], Trace]]] = {
    "keys": read_keys,
    "oracle": read_oracle,
}
"""Formats in which every id is a separate request."""


def read_trace(
    path: Path | str, *, format_name: TraceFormat = "auto", tokens_per_id: int | None = None
) -> Trace:
    """Read the trace at ``path``, plain or compressed with gzip or zstd.

    Args:
        path: The file.
        format_name: The file's format. ``auto`` detects the format from the content.
        tokens_per_id: Number of tokens per id. If None, it is read or estimated.

    Raises:
        TraceError: The file cannot be read; the message has the line and a remedy.
    """
    source = open_source(Path(path))
    found = format_name == "auto"
    kind = FORMATS[_detect(source) if found else format_name]
    if read_flat := _FLAT.get(kind.name):
        tokens = tokens_per_id or kind.tokens_per_id
        origin = "given" if tokens_per_id else "the format's default"
        trace = read_flat(source, tokens)
        trace = replace(trace, assumed=(f"tokens per id: {tokens:,} ({origin})",))
    else:
        trace = read_json(source, kind, tokens_per_id)
    name = f"format: {kind.name} ({'detected' if found else 'given'})"
    return replace(trace, assumed=(name, kind.times, *trace.assumed))


def _detect(source: Source) -> str:
    sample = source.content[:_SAMPLE_NBYTES]
    if b"\0" in sample:
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
    """Raise a TraceError unless the beginning of ``source`` has one plain key per line.

    Without this check, the reader would accept a configuration or a log as a trace. Keys with
    blanks or colons need ``--format keys``.
    """
    lines = sample.split(b"\n")
    if len(sample) < len(source.content) and len(lines) > 1:
        del lines[-1]  # the sample ends inside this line
    for number, line in enumerate(lines, start=1):
        word = line.strip()
        if word and not _PLAIN_KEY.fullmatch(word):
            problem = "not a trace"
            remedy = "name a trace file; if every line of it is a key, add --format keys"
            raise source.error(number, problem, remedy)
