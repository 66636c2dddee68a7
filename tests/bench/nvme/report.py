"""The result as a table, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from kvtier.units import approximate_size
from tests.bench.nvme.rows import Row, Spread

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_table", "write_json", "write_markdown"]

_COLUMNS = ("figure", "chunk", "kvtier", "peer", "its figure", "ratio", "bar", "met")
_VERDICTS = {True: "yes", False: "no", None: ""}


def print_table(console: Console, rows: Sequence[Row], machine: Mapping[str, str]) -> None:
    """Print every row, its spread and its bar."""
    table = Table(*_COLUMNS, box=box.SIMPLE)
    for row, cells in zip(rows, _cells(rows), strict=True):
        table.add_row(*cells, style="red" if row.met is False else None)
    console.print(table)
    for remark in _remarks(rows):
        console.print(remark)
    for name, value in machine.items():
        console.print(f"{name}: {value}", highlight=False)


def write_markdown(
    path: Path, rows: Sequence[Row], machine: Mapping[str, str], command: str
) -> None:
    """Write what belongs into docs/benchmarks.md."""
    lines = [
        *(
            f"* {name}: {value}"
            for name, value in {"command": f"`{command}`", **machine}.items()
        ),
        "",
        _line(_COLUMNS),
        _line("---" for _ in _COLUMNS),
        *map(_line, _cells(rows)),
        "",
        *_remarks(rows),
    ]
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows, one JSON object each, in one array."""
    lines = ",\n".join(json.dumps(row.as_json()) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _cells(rows: Iterable[Row]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        name = row.bench if row.of == row.bench else f"{row.bench}: {row.of}"
        yield (
            f"{name}, {row.unit}",
            approximate_size(row.chunk_nbytes) if row.chunk_nbytes else "",
            _spread(row.kvtier),
            row.peer,
            _spread(row.peer_value),
            _spread(row.ratio),
            ", ".join(map(str, row.bars)),
            _VERDICTS[row.met],
        )


def _remarks(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.remark for row in rows if row.remark))


def _spread(spread: Spread) -> str:
    if spread.least == spread.most:
        return _number(spread.median)
    return f"{_number(spread.median)} ({_number(spread.least)}..{_number(spread.most)})"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
