"""Reads JSON Lines traces: Mooncake's format, LMBench's variant, and Qwen-Bailian's format.

All formats have ``hash_ids``, ``input_length`` and ``output_length``. The formats differ in the
unit of timestamps. The number of tokens per id differs even between traces of one format. A
record may have this number as ``block_tokens``, as in kvtier's recordings. Otherwise the reader
estimates the number from all requests.

Let a request have ``length`` tokens and ``n`` ids. Then ``n = ceil(length / tokens)`` if a
partial last chunk has an id, else ``n = floor(length / tokens)``. Each equation allows an
interval of values for ``tokens``. The estimate is a value that the most requests allow.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from kvtier.sim.traces._source import TO_UTF8, Format, Source, TraceBuilder
from kvtier.sim.traces._trace import IdArray, Trace

__all__ = ["detect_json", "read_json"]

_MAX_TOKENS: Final = 1 << 40
_MAJORITY: Final = 0.5
_LATEST: Final = 1 << 63
_NO_CHAT: Final = "-1"
"""The ``parent_chat_id`` of the first chat in a conversation."""
_EXAMPLE: Final = (
    '{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]}'
)


def detect_json(source: Source) -> str:
    """Return the JSON format of ``source``, by its first line."""
    first = next(line for line in source.content.splitlines() if line.strip())
    record = _parse(source, 1, first)
    if "parent_chat_id" in record:
        return "bailian"
    return "lmbench" if isinstance(record.get("timestamp"), str) else "mooncake"


def read_json(source: Source, kind: Format, tokens_per_id: int | None) -> Trace:
    """Read ``source`` in the format ``kind``, in order of arrival.

    Without ``tokens_per_id``, the number of tokens per id is read or estimated.

    Raises:
        TraceError: A line does not match the format; the message names the line.
    """
    numbered = enumerate(source.content.split(b"\n"), start=1)
    lines = [(number, line) for number, line in numbered if line.strip()]
    trace = _read_lines(source, kind, lines)
    warnings = []
    early = int((np.diff(trace.timestamps_s) < 0).sum())
    if early:
        order = np.argsort(trace.timestamps_s, kind="stable").tolist()
        trace = _read_lines(source, kind, [lines[place] for place in order])
        warnings.append(
            f"{early:,} of {trace.requests:,} requests have an earlier timestamp than the line "
            "before: all lines were sorted by timestamp; if the file joins traces whose clocks "
            "restart, read each on its own"
        )
    ids = np.diff(trace.offsets)
    tokens, origin = _tokens_per_id(trace, kind, tokens_per_id)
    misfits, first = _count_misfits(trace.input_tokens, ids, tokens)
    if misfits:
        warnings.append(
            f"{misfits:,} of {trace.requests:,} requests contradict {tokens:,} tokens per id, "
            f"the first with input_length = {trace.input_tokens[first]} and {ids[first]} "
            "hash_ids: sizes, times and shares of tokens are estimates; name another number "
            "with --tokens-per-id"
        )
    return replace(
        trace,
        chunk_tokens=tokens,
        assumed=(f"tokens per id: {tokens:,} ({origin})",),
        warnings=tuple(warnings),
    )


def _read_lines(source: Source, kind: Format, lines: Iterable[tuple[int, bytes]]) -> Trace:
    """Parse numbered lines to a trace. The trace's ``chunk_tokens`` is 0 if unknown."""
    builder = TraceBuilder(chunk_tokens=0)
    roots: dict[str, str] = {}
    before: int | None = None
    for number, line in lines:
        reader = _Record(source, number, _parse(source, number, line))
        tokens = reader.block_tokens()
        if before not in {None, tokens}:
            problem = f"block_tokens = {tokens or 'none'}, {before or 'none'} before"
            raise reader.error(problem, "split the trace: all its chunks have one size")
        before = builder.chunk_tokens = tokens
        builder.add(
            reader.ids(),
            timestamp_s=reader.timestamp(kind),
            input_tokens=reader.count("input_length"),
            output_tokens=reader.count("output_length", default=0),
            session=reader.name("session_id") or _conversation(reader, roots),
        )
    return builder.build(source, kind.name)


def _tokens_per_id(trace: Trace, kind: Format, given: int | None) -> tuple[int, str]:
    """Return the number of tokens per hash id, and a description of the number's source."""
    if given is not None:
        return given, "given"
    if trace.chunk_tokens:
        return trace.chunk_tokens, "block_tokens of the records"
    ids = np.diff(trace.offsets)
    return _estimate_tokens(trace.input_tokens, ids, default=kind.tokens_per_id)


def _conversation(reader: _Record, roots: dict[str, str]) -> str:
    """Return the id of the first chat in the conversation of a Qwen-Bailian record.

    ``roots`` has the first chat of each chat read so far; this call adds an entry.
    """
    chat, parent = reader.name("chat_id"), reader.name("parent_chat_id")
    # Chats with the same parent are one conversation, even if the parent is not in the file.
    root = chat if parent in {"", _NO_CHAT} else roots.get(parent, parent)
    if chat:
        roots[chat] = root
    return root


def _parse(source: Source, line: int, raw: bytes) -> dict[str, Any]:
    try:
        record = json.loads(raw.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        problem = f"not JSON: {error.msg} at column {error.colno}"
        remedy = f"complete or remove the line; one looks like {_EXAMPLE}"
        raise source.error(line, problem, remedy) from error
    except UnicodeDecodeError as error:
        remedy = f"{TO_UTF8}; or it is damaged, or not JSON Lines: see --format"
        raise source.error(line, "not UTF-8 text", remedy) from error
    except (ValueError, RecursionError) as error:
        problem = "a number too long or a list too deep to be read"
        raise source.error(line, problem, f"a request looks like {_EXAMPLE}") from error
    if not isinstance(record, dict):
        problem = f"a JSON {type(record).__name__} where an object belongs"
        raise source.error(line, problem, f"write one request a line: {_EXAMPLE}")
    return record


class _Record:
    """The JSON object in one line. The methods read and check the object's fields."""

    def __init__(self, source: Source, line: int, values: dict[str, Any]) -> None:
        self._source = source
        self._line = line
        self._values = values

    def error(self, problem: str, remedy: str) -> Exception:
        """Return an error about this line, for the caller to raise."""
        return self._source.error(self._line, problem, remedy)

    def ids(self) -> list[Hashable]:
        """Return the field ``hash_ids``, a list of numbers or strings."""
        ids = self._field("hash_ids")
        if not isinstance(ids, list):
            problem = f"hash_ids = {json.dumps(ids)[:40]} is not a list"
            raise self.error(problem, "write the request's chunk ids, root to leaf: [0, 1]")
        strange = set(map(type, ids)) - {int, str}
        if strange:
            kinds = ", ".join(sorted(kind.__name__ for kind in strange))
            remedy = "an id is a whole number or a string"
            raise self.error(f"hash_ids holds {kinds}", remedy)
        return ids

    def count(self, key: str, *, default: int | None = None) -> int:
        """Return the number of tokens in the field ``key``, or ``default`` if it is missing."""
        value = self._values.get(key, default)
        if value is None:
            value = self._field(key)
        if type(value) is not int:
            remedy = "write a number of tokens"
            raise self.error(f"{key} = {json.dumps(value)[:40]} is not a whole number", remedy)
        if not 0 <= value < _MAX_TOKENS:
            problem = f"{key} = {value} is {'negative' if value < 0 else 'too large'}"
            raise self.error(problem, "write a number of tokens")
        return value

    def block_tokens(self) -> int:
        """Return the record's ``block_tokens``; 0 if the field is missing."""
        tokens = self.count("block_tokens", default=0)
        if not tokens and "block_tokens" in self._values:
            raise self.error("block_tokens = 0", "write a number of tokens, or leave it out")
        return tokens

    def name(self, key: str) -> str:
        """Return the field ``key`` as text; empty if the field is missing."""
        value = self._values.get(key)
        if value is None:
            return ""
        if isinstance(value, bool) or not isinstance(value, int | str):
            problem = f"{key} = {json.dumps(value)[:40]} is not a name"
            raise self.error(problem, "write a text or a whole number, or leave it out")
        return str(value)

    def timestamp(self, kind: Format) -> float:
        """Return the time of arrival in seconds."""
        value = self._field("timestamp")
        shown = json.dumps(value)[:40]
        if kind.text_timestamp:
            if not (isinstance(value, str) and value.isascii() and value.isdecimal()):
                remedy = "write nanoseconds as a string, or choose --format mooncake"
                raise self.error(f"timestamp = {shown} is not a string of digits", remedy)
            return int(value) / kind.ticks_per_s
        if isinstance(value, bool) or not isinstance(value, int | float):
            remedy = "write a number, or choose --format lmbench for strings"
            raise self.error(f"timestamp = {shown} is not a number", remedy)
        if not 0 <= value < _LATEST:
            raise self.error(f"timestamp = {shown} is not a time", "write 0 or more")
        return value / kind.ticks_per_s

    def _field(self, key: str) -> Any:  # noqa: ANN401 - any JSON value
        if key not in self._values:
            raise self.error(f"{key} is missing", f"a request looks like {_EXAMPLE}")
        return self._values[key]


def _estimate_tokens(lengths: IdArray, ids: IdArray, *, default: int) -> tuple[int, str]:
    """Estimate the number of tokens per id; return it with a text that explains it.

    ``lengths`` and ``ids`` are the tokens and ids of each request. ``default`` is the format's
    number, and the result unless another number fits more requests.
    """
    known = (lengths > 0) & (ids > 0)
    lengths, ids = lengths[known], ids[known]
    if not len(ids):
        return default, "the format's default; the records do not say"
    most = np.where(ids > 1, (lengths - 1) // np.maximum(ids - 1, 1), _MAX_TOKENS)
    rounded_up = _common_range(-(-lengths // ids), most)
    rounded_down = _common_range(lengths // (ids + 1) + 1, lengths // ids)
    count, low, high = max(rounded_up, rounded_down)
    for other, lowest, highest in (rounded_up, rounded_down):
        if other == count and lowest <= default <= highest:
            return default, "the format's default; the records agree"
    if count > _MAJORITY * len(ids):
        return _roundest(low, high), "derived from input_length and hash_ids"
    mean = max(1, round(int(lengths.sum()) / int(ids.sum())))
    return mean, "the mean of the records"


def _count_misfits(lengths: IdArray, ids: IdArray, tokens_per_id: int) -> tuple[int, int]:
    """Return how many requests have a wrong number of ids, and the first one's index."""
    misfits = np.flatnonzero(np.abs(lengths - ids * tokens_per_id) >= tokens_per_id)
    return len(misfits), int(misfits[0]) if len(misfits) else 0


def _common_range(lows: IdArray, highs: IdArray) -> tuple[int, int, int]:
    """Find where most intervals overlap; return their number and the ends of the overlap.

    An interval includes both ends. An interval that ends before its start is empty.
    """
    some = lows <= highs
    edges, places = np.unique(
        np.concatenate((lows[some], highs[some] + 1)), return_inverse=True
    )
    if not len(edges):
        return 0, 0, 0
    steps = np.repeat((1, -1), int(some.sum()))
    depth = np.cumsum(np.bincount(places, weights=steps).astype(np.int64))
    best = int(np.argmax(depth))
    return int(depth[best]), int(edges[best]), int(edges[best + 1]) - 1


def _roundest(low: int, high: int) -> int:
    """Return the number from ``low`` to ``high`` with the most trailing zero bits.

    >>> _roundest(300, 599), _roundest(33, 35)
    (512, 34)
    """
    power = 1
    while high // (2 * power) * 2 * power >= low:
        power *= 2
    return high // power * power
