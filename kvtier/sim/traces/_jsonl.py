"""JSON Lines traces: Mooncake's, LMBench's variant of it, and Qwen-Bailian's.

They agree on ``hash_ids``, ``input_length`` and ``output_length`` and differ in the timestamp's
unit and in how many tokens an id stands for. A record may say the latter itself, as
``block_tokens``: kvtier's own recordings do, because an engine's chunks have any size.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier.recording import CALLS_MARK
from kvtier.sim.traces._builder import TraceBuilder
from kvtier.sim.traces._source import Source
from kvtier.sim.traces._trace import Trace

__all__ = ["JSON_FORMATS", "detect_json", "read_json"]

_MOST_TOKENS: Final = 1 << 40
_LATEST: Final = 1 << 63
_NO_CHAT: Final = "-1"
"""The parent of a chat that begins a conversation."""
_EXAMPLE: Final = (
    '{"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]}'
)


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """How one JSON format differs from the others.

    Attributes:
        name: Its name on the command line.
        ticks_per_s: Timestamp units per second.
        block_tokens: Tokens per id where the records do not say.
        text_timestamp: Whether the timestamp is a string.
    """

    name: str
    ticks_per_s: float
    block_tokens: int
    text_timestamp: bool = False


JSON_FORMATS: Final[Mapping[str, JsonFormat]] = {
    "mooncake": JsonFormat("mooncake", 1e3, 512),
    "lmbench": JsonFormat("lmbench", 1e9, 512, text_timestamp=True),
    "bailian": JsonFormat("bailian", 1.0, 16),
}


def detect_json(source: Source) -> str:
    """Return which JSON format ``source``, whose first line is an object, has.

    Raises:
        TraceError: The first line is no JSON object.
    """
    first = next(line for line in source.content.splitlines() if line.strip())
    record = _parse(source, 1, first)
    if CALLS_MARK in record:
        remedy = "replay it with kvtier sim run --config, or name its requests-*.jsonl"
        raise source.error(1, "a recording of calls, not a trace of requests", remedy)
    if "chat_id" in record or "parent_chat_id" in record:
        return "bailian"
    return "lmbench" if isinstance(record.get("timestamp"), str) else "mooncake"


def read_json(source: Source, format_name: str) -> Trace:
    """Read ``source`` as one of :data:`JSON_FORMATS`.

    Raises:
        TraceError: A line is not what the format says; it names the line.
    """
    kind = JSON_FORMATS[format_name]
    builder = TraceBuilder(chunk_tokens=0)
    roots: dict[str, str] = {}
    for number, line in enumerate(source.content.split(b"\n"), start=1):
        if not line.strip():
            continue
        reader = _Record(source, number, _parse(source, number, line))
        tokens = reader.count("block_tokens", default=kind.block_tokens)
        if builder.chunk_tokens not in {0, tokens} or not tokens:
            problem = f"block_tokens = {tokens}, {builder.chunk_tokens} before"
            raise reader.error(problem, "split the trace: all its chunks have one size")
        builder.chunk_tokens = tokens
        builder.add(
            reader.ids(),
            timestamp_s=reader.timestamp(kind),
            input_tokens=reader.count("input_length"),
            output_tokens=reader.count("output_length", default=0),
            session=reader.name("session_id") or _conversation(reader, roots),
        )
    return builder.build(source, format_name)


def _conversation(reader: _Record, roots: dict[str, str]) -> str:
    """Return the first chat of the conversation that a Qwen-Bailian record goes on with.

    Args:
        reader: The record.
        roots: The first chat of each chat read so far; brought up to date.
    """
    chat, parent = reader.name("chat_id"), reader.name("parent_chat_id")
    # A parent that the file does not have still joins the chats that go on from it.
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
        remedy = "the file is damaged, or no JSON Lines: see --format"
        raise source.error(line, "not UTF-8 text", remedy) from error
    except (ValueError, RecursionError) as error:
        problem = "a number too long or a list too deep to be read"
        raise source.error(line, problem, f"a request looks like {_EXAMPLE}") from error
    if not isinstance(record, dict):
        problem = f"a JSON {type(record).__name__} where an object belongs"
        raise source.error(line, problem, f"write one request a line: {_EXAMPLE}")
    return record


class _Record:
    """One line's object, read field by field."""

    def __init__(self, source: Source, line: int, values: dict[str, Any]) -> None:
        self._source = source
        self._line = line
        self._values = values

    def error(self, problem: str, remedy: str) -> Exception:
        """Return an error at this line, to be raised."""
        return self._source.error(self._line, problem, remedy)

    def ids(self) -> list[Hashable]:
        """Return ``hash_ids``: numbers or strings, which name content and are never equal."""
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
        """Return a number of tokens."""
        value = self._values.get(key, default)
        if value is None:
            value = self._field(key)
        if type(value) is not int:
            remedy = "write a number of tokens"
            raise self.error(f"{key} = {json.dumps(value)[:40]} is not a whole number", remedy)
        if not 0 <= value < _MOST_TOKENS:
            problem = f"{key} = {value} is {'negative' if value < 0 else 'too large'}"
            raise self.error(problem, "write a number of tokens")
        return value

    def name(self, key: str) -> str:
        """Return what the record calls itself: a text or a number; empty if nothing."""
        value = self._values.get(key)
        if value is None:
            return ""
        if isinstance(value, bool) or not isinstance(value, int | str):
            problem = f"{key} = {json.dumps(value)[:40]} is not a name"
            raise self.error(problem, "write a text or a whole number, or leave it out")
        return str(value)

    def timestamp(self, kind: JsonFormat) -> float:
        """Return the arrival in seconds."""
        value = self._field("timestamp")
        shown = json.dumps(value)[:40]
        if kind.text_timestamp:
            if not (isinstance(value, str) and value.isascii() and value.isdecimal()):
                remedy = "write nanoseconds as a string, or choose --format mooncake"
                raise self.error(f"timestamp = {shown} is no string of digits", remedy)
            return int(value) / kind.ticks_per_s
        if isinstance(value, bool) or not isinstance(value, int | float):
            remedy = "write a number, or choose --format lmbench for strings"
            raise self.error(f"timestamp = {shown} is not a number", remedy)
        if not 0 <= value < _LATEST:
            raise self.error(f"timestamp = {shown} is not a time", "write 0 or more")
        return value / kind.ticks_per_s

    def _field(self, key: str) -> Any:  # noqa: ANN401 - what JSON holds
        if key not in self._values:
            raise self.error(f"{key} is missing", f"a request looks like {_EXAMPLE}")
        return self._values[key]
