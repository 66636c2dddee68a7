"""The formats of traces: how each writes times, and how many tokens an id stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

__all__ = ["FORMATS", "FORMAT_NAMES", "Format", "TraceFormat"]

TraceFormat = Literal["auto", "mooncake", "lmbench", "bailian", "keys", "oracle"]
FORMAT_NAMES: Final[tuple[str, ...]] = get_args(TraceFormat)


@dataclass(frozen=True, slots=True)
class Format:
    """What a format leaves to its readers to know.

    Attributes:
        name: Its name on the command line.
        times: What its timestamps are, in words.
        ticks_per_s: Timestamp units per second.
        tokens_per_id: Tokens per id by its definition; a trace may have another number.
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
