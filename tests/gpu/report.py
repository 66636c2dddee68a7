"""The table of a run, as Markdown, so that docs/benchmarks.md can have it as it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tests.gpu.bars import BARS, verdicts
from tests.gpu.rows import STAGE_ROW, Row

__all__ = ["make_report"]


def make_report(rows: Sequence[Row], *, judges: bool = True) -> str:
    """Return facts, figures with their bars, bars without a figure, and stages, in this order.

    Args:
        rows: All rows of a run.
        judges: Whether to hold figures to the bars; false for a rehearsal.
    """
    facts = [row for row in rows if row.median is None and row.what != STAGE_ROW]
    figures = [row for row in rows if row.median is not None and row.what != STAGE_ROW]
    stages = [row for row in rows if row.what == STAGE_ROW]
    parts = [
        _table(("stage", "fact", ""), ((row.stage, _name(row), row.note) for row in facts)),
        _table(
            ("stage", "figure", "median", "least to most", "bar"),
            (_figure(row, rows if judges else ()) for row in figures),
        ),
        _table(("bar", ""), ((name, "unmeasured") for name in _unmeasured(rows) if judges)),
        _table(("stage", "result", "seconds"), map(_stage, stages)),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _figure(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    spread = f"{_number(row.least)} to {_number(row.most)}, n={row.runs}"
    remarks = [*map(str, verdicts(row, rows) if rows else ()), row.note]
    median = f"{_number(row.median)} {row.unit}".strip()
    return row.stage, _name(row), median, spread, "; ".join(filter(None, remarks))


def _stage(row: Row) -> tuple[str, ...]:
    return row.stage, row.note, "" if row.median is None else f"{row.median:.1f}"


def _unmeasured(rows: Sequence[Row]) -> Iterator[str]:
    for bar in BARS:
        if not any(bar.applies(row) and bar.judge(row, rows) for row in rows):
            yield bar.name


def _name(row: Row) -> str:
    wrong = "WRONG BYTES" if row.is_wrong else ""
    return ", ".join(filter(None, (row.what, row.size, row.method, wrong)))


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_line(cells) for cells in rows]
    return "\n".join([_line(head), _line(["---"] * len(head)), *lines]) if lines else ""


def _line(cells: Sequence[str]) -> str:
    # Compact, without padding: the output of a remote command may be cut to some kilobytes.
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"
