"""Prints tables, prose and JSON to a terminal or a pipe."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

__all__ = [
    "count_chunks",
    "make_console",
    "make_table",
    "show_facts",
    "show_json",
    "show_line",
    "show_prose",
    "show_table",
    "show_tiers_apart",
]

_WIDEST = 1000


def count_chunks(chunks: int) -> str:
    """Return the number of chunks as text, such as ``1 chunk`` or ``2 chunks``."""
    return "1 chunk" if chunks == 1 else f"{chunks:,} chunks"


def show_json(value: object) -> None:
    """Print ``value``, a dict or a list that JSON can represent, as JSON."""
    typer.echo(json.dumps(value, indent=2))


def make_console() -> Console:
    """Return a console for stdout that prints names unchanged.

    Lines to a pipe or a file are not wrapped, so ``grep`` and ``cut`` see whole lines. The
    environment variable COLUMNS overrides the width.
    """
    columns = shutil.get_terminal_size((_WIDEST, 0)).columns
    return Console(width=columns, highlight=False, markup=False, emoji=False)


def make_table(*words: str, numbers: tuple[str, ...], narrow: bool = False) -> Table:
    """Return an empty table with text columns, then right-aligned number columns.

    ``words`` and ``numbers`` are headers; ``narrow`` reduces the space between columns.
    """
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0) if narrow else (0, 3, 0, 2),
        header_style="dim",
        show_header=any((*words, *numbers)),
    )
    for word in words:
        table.add_column(word, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def show_facts(facts: Mapping[str, object]) -> None:
    """Print one row for each pair of a name and a value."""
    table = make_table("", numbers=("",))
    for name, value in facts.items():
        form = "," if isinstance(value, int) else ""
        if isinstance(value, float):
            form = ",.0f" if value > 1000 else ".4g"
        table.add_row(name.replace("_", " "), f"{value:{form}}")
    show_table(make_console(), table)


def show_table(console: Console, table: Table) -> None:
    """Print ``table`` at its full width. A narrower terminal wraps the lines."""
    _show_lines(console, table, _width_of(console, table))


def show_tiers_apart(
    console: Console, *words: str, numbers: tuple[str, ...], tiers: Sequence[Sequence[str]]
) -> None:
    """Print one row per tier, or one column per tier if the rows are too wide.

    The cells of each tier are in the order of ``words`` and ``numbers``, the headers of text
    and numbers. The first has the tier's name.
    """
    table = make_table(*words, numbers=numbers, narrow=True)
    for tier in tiers:
        table.add_row(*tier)
    if _width_of(console, table) > console.width:
        name, *heads = (*words, *numbers)
        names, *figures = zip(*tiers, strict=True)
        table = make_table(name, numbers=names, narrow=True)
        for head, cells in zip(heads, figures, strict=True):
            table.add_row(head, *cells)
    show_table(console, table)


def show_line(console: Console, text: str) -> None:
    """Print a line of prose, wrapped to the width of ``console``."""
    lines = textwrap.fill(text, console.width, subsequent_indent="  ", break_long_words=False)
    console.print(Text(lines), soft_wrap=True)


def show_prose(console: Console, table: Table) -> None:
    """Print ``table``, with its cells wrapped to fit the width of ``console``."""
    _show_lines(console, table, console.width)


def _width_of(console: Console, table: Table) -> int:
    """Return the width of ``table`` without wrapping, in characters."""
    options = console.options.update(max_width=_WIDEST)
    return Measurement.get(console, options, table).maximum


def _show_lines(console: Console, table: Table, width: int) -> None:
    """Print ``table`` in lines of at most ``width`` characters, without trailing blanks."""
    options = console.options.update(width=width)
    for segments in console.render_lines(table, options, pad=False):
        line = Text()
        for segment in segments:
            line.append(segment.text, segment.style)
        line.rstrip()
        console.print(line, soft_wrap=True)
