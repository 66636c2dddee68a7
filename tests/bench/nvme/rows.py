"""Results: one row per figure and peer, medians over rounds, and the bars they must clear."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

__all__ = ["BARS", "Bar", "Row", "Spread"]


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Self:
        """Sum up one value per round."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Row:
    """kvtier beside one peer.

    Attributes:
        bench: What was measured.
        of: Which figure of that bench, where it has several.
        chunk_nbytes: Bytes of a chunk.
        peer: ``fio``, ``native_fs``, ``native_lru``, or ``self`` where kvtier is compared with
            itself, or with a fixed limit.
        kvtier: kvtier's figure.
        peer_value: The peer's, the limit's, or kvtier's other one.
        ratio: kvtier's over the peer's of the same round.
        unit: Of both figures.
        rounds: How many there were.
        remark: What else to know.
    """

    bench: str
    of: str
    chunk_nbytes: int
    peer: str
    kvtier: Spread
    peer_value: Spread
    ratio: Spread
    unit: str
    rounds: int
    remark: str = ""

    @classmethod
    def over_rounds(
        cls,
        bench: str,
        chunk_nbytes: int,
        peer: str,
        figures: tuple[Sequence[float], Sequence[float]],
        unit: str,
        *,
        of: str = "",
        remark: str = "",
    ) -> Self:
        """Sum up kvtier's figures and the peer's, one each per round."""
        ours, theirs = figures
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        return cls(
            bench=bench,
            of=of or bench,
            chunk_nbytes=chunk_nbytes,
            peer=peer,
            kvtier=Spread.over(ours),
            peer_value=Spread.over(theirs),
            ratio=Spread.over(ratios),
            unit=unit,
            rounds=len(ratios),
            remark=remark,
        )

    @property
    def bars(self) -> list[Bar]:
        """The bars this row must clear."""
        return [bar for bar in BARS if bar.applies(self)]

    @property
    def met(self) -> bool | None:
        """Whether all of them are cleared; None when there is none."""
        return all(bar.met(self) for bar in self.bars) if self.bars else None

    def as_json(self) -> dict[str, Any]:
        """Return the row as it is written to a file."""
        return {
            "bench": self.bench,
            "chunk_bytes": self.chunk_nbytes,
            "peer": self.peer,
            "kvtier": self.kvtier.median,
            "peer_value": self.peer_value.median,
            "ratio": self.ratio.median,
            "unit": self.unit,
            "of": self.of,
            "kvtier_min": self.kvtier.least,
            "kvtier_max": self.kvtier.most,
            "peer_min": self.peer_value.least,
            "peer_max": self.peer_value.most,
            "ratio_min": self.ratio.least,
            "ratio_max": self.ratio.most,
            "rounds": self.rounds,
            "bar": ", ".join(str(bar) for bar in self.bars),
            "met": self.met,
            "remark": self.remark,
        }


@dataclass(frozen=True, slots=True)
class Bar:
    """What a row must reach.

    Attributes:
        bench: The row's bench.
        peer: The row's peer.
        figure: What is compared: the median ratio, or kvtier's own median.
        sense: How.
        limit: With what.
        of: The row's figure; any when empty.
        chunk_nbytes: The row's chunk size; any when 0.
    """

    bench: str
    peer: str
    figure: Literal["ratio", "kvtier"]
    sense: Literal[">=", "<=", "<"]
    limit: float
    of: str = ""
    chunk_nbytes: int = 0

    def applies(self, row: Row) -> bool:
        """Whether the bar is for ``row``."""
        return (
            (self.bench, self.peer) == (row.bench, row.peer)
            and self.of in {"", row.of}
            and self.chunk_nbytes in {0, row.chunk_nbytes}
        )

    def met(self, row: Row) -> bool:
        """Whether ``row`` clears it."""
        found = row.ratio.median if self.figure == "ratio" else row.kvtier.median
        if self.sense == ">=":
            return found >= self.limit
        return found <= self.limit if self.sense == "<=" else found < self.limit

    def __str__(self) -> str:
        what = "x" if self.figure == "ratio" else ""
        return f"{self.sense} {self.limit:.3g}{what}"


BARS = (
    Bar("promote", "fio", "ratio", ">=", 0.95),
    Bar("promote", "native_fs", "ratio", ">=", 2.5, chunk_nbytes=128 << 10),
    Bar("promote", "native_fs", "ratio", ">=", 1.5, chunk_nbytes=512 << 10),
    Bar("promote", "native_fs", "ratio", ">=", 1.0, chunk_nbytes=2 << 20),
    Bar("store", "fio", "ratio", ">=", 0.95),
    Bar("cpu", "native_fs", "ratio", "<=", 0.35),
    Bar("jitter", "native_fs", "kvtier", "<=", 2.0),
    Bar("jitter", "native_fs", "ratio", "<", 1.0),
    Bar("busy", "self", "ratio", ">=", 0.9),
    Bar("aged", "self", "ratio", ">=", 0.85),
    Bar("manager", "native_lru", "ratio", "<=", 1 / 3),
    Bar("open", "self", "kvtier", "<=", 5.0, of="seconds"),
    Bar("open", "self", "kvtier", "<=", 400.0, of="memory"),
)
