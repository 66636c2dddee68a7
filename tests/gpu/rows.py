"""What a run found: one row per figure or fact, appended to a file of JSON Lines at once."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["STAGE_ROW", "Row", "append_row", "figure_row", "read_rows"]

STAGE_ROW: Final = "stage"
"""The ``what`` of the row that holds a stage's result."""


@dataclass(frozen=True, slots=True)
class Row:
    """A figure or a fact.

    Attributes:
        stage: The stage that found it.
        what: What was measured, for copies the direction: ``load``, ``store`` or ``both``.
        method: What moved the bytes, if there are several.
        size: Bytes of a unit of the work, for people: ``64KiB``.
        unit: Of the numbers.
        median: Median of the runs; None for a fact.
        least: Least of the runs.
        most: Most of the runs.
        runs: Number of runs.
        note: A fact, or what else to know.
        is_wrong: Whether bytes were wrong after a copy.
    """

    stage: str
    what: str
    method: str = ""
    size: str = ""
    unit: str = ""
    median: float | None = None
    least: float | None = None
    most: float | None = None
    runs: int = 0
    note: str = ""
    is_wrong: bool = False


def figure_row(
    stage: str,
    what: str,
    values: Sequence[float],
    unit: str,
    *,
    method: str = "",
    size: str = "",
    note: str = "",
) -> Row:
    """Return the row that sums up ``values``, one per run."""
    middle = statistics.median(values)
    return Row(
        stage, what, method, size, unit, middle, min(values), max(values), len(values), note
    )


def append_row(path: Path, row: Row) -> None:
    """Append ``row`` in one write, so that a process that dies leaves whole lines."""
    line = json.dumps(dataclasses.asdict(row)) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file; none if there is no file."""
    rows: list[Row] = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a line that a full disk cut off
                rows.append(Row(**json.loads(line)))
    return rows
