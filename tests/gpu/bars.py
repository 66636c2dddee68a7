"""The bars: what a figure must reach, beside a reference that the same run measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.gpu.rows import Row

__all__ = ["BARS", "Bar", "Verdict", "verdicts"]

KVTIER = "kvtier"
"""The method that kvtier itself chooses. Its other methods have names that begin so."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure held to one bar.

    Attributes:
        bar: The bar.
        value: The figure, as a ratio if the bar has references.
        met: Whether the bar is met.
    """

    bar: Bar
    value: float
    met: bool

    def __str__(self) -> str:
        sign = ">=" if self.bar.at_least else "<="
        of = f" of {self.bar.of}" if self.bar.of else ""
        answer = "yes" if self.met else "NO"
        return f"{self.value:.3g}{of} {sign} {self.bar.limit:g}: {answer}"


@dataclass(frozen=True, slots=True)
class Bar:
    """A limit for some figures.

    Attributes:
        name: What it demands, for people.
        stage: The stage that measures the figures.
        figures: The ``what`` of the figures.
        limit: The least or the most that the figure, or its ratio, may be.
        method: Method of the figures.
        sizes: Their sizes; empty for all.
        at_least: Whether ``limit`` is the least, else it is the most.
        of: Name of the reference, for people; empty if the figure itself has the limit.
        references: Stage and method of the references; the largest one counts. A reference has
            the figure's ``what``, and its size if it is of the same stage.
    """

    name: str
    stage: str
    figures: tuple[str, ...]
    limit: float
    method: str = KVTIER
    sizes: tuple[str, ...] = ()
    at_least: bool = True
    of: str = ""
    references: tuple[tuple[str, str], ...] = ()

    def applies(self, row: Row) -> bool:
        """Return whether ``row`` is one of the bar's figures."""
        return (
            row.median is not None
            and (row.stage, row.method) == (self.stage, self.method)
            and row.what in self.figures
            and (not self.sizes or row.size in self.sizes)
        )

    def judge(self, row: Row, rows: Sequence[Row]) -> Verdict | None:
        """Hold ``row`` to this bar; None if no reference was measured."""
        value = row.median or 0.0
        if self.references:
            reference = max(self._references(row, rows), default=0.0)
            if not reference:
                return None
            value /= reference
        met = value >= self.limit if self.at_least else value <= self.limit
        return Verdict(self, value, met)

    def _references(self, row: Row, rows: Sequence[Row]) -> list[float]:
        return [
            each.median
            for each in rows
            if each.median is not None
            and each.what == row.what
            and (each.stage, each.method) in self.references
            and (each.stage != row.stage or each.size == row.size)
        ]


BARS = (
    Bar(
        "copies of fragments of 64 KiB and more",
        "copies",
        ("load", "store"),
        0.90,
        sizes=("64KiB", "256KiB", "2MiB"),
        of="one large copy",
        references=(("ceilings", "cudaHostAlloc"),),
    ),
    Bar(
        "loads of fragments of 16 KiB",
        "copies",
        ("load",),
        0.75,
        sizes=("16KiB",),
        of="one large copy",
        references=(("ceilings", "cudaHostAlloc"),),
    ),
    Bar(
        "both directions at once",
        "copies",
        ("both",),
        0.85,
        of="two large copies",
        references=(("ceilings", "cudaHostAlloc"),),
    ),
    Bar(
        "both directions at once in the device engine",
        "device_engine",
        ("both",),
        0.85,
        sizes=("2048 x 512KiB",),
        of="two large copies",
        references=(("ceilings", "cudaHostAlloc"),),
    ),
    Bar(
        "beside vLLM's own copies",
        "copies",
        ("load", "store"),
        1.0,
        of="vLLM's",
        references=(("copies", "vllm"),),
    ),
    Bar("slowdown of a matmul loop", "slowdown", ("matmul loop",), 3.0, at_least=False),
    Bar("slowdown of an HBM-bound loop", "slowdown", ("HBM loop",), 8.0, at_least=False),
    Bar(
        "engine's thread per job, us",
        "device_engine",
        ("submit load", "submit store"),
        100.0,
        at_least=False,
    ),
    Bar(
        "NVMe to GPU",
        "file_reads",
        ("load",),
        0.95,
        of="the better of kvikio and fio",
        references=(("file_reads", "kvikio"), ("file_reads", "fio")),
    ),
)


def verdicts(row: Row, rows: Sequence[Row]) -> list[Verdict]:
    """Return the verdicts on ``row``, given all rows of its run."""
    found = (bar.judge(row, rows) for bar in BARS if bar.applies(row))
    return [verdict for verdict in found if verdict is not None]
