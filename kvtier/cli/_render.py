"""Tables, prose, JSON and progress bars on a terminal or in a pipe."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

__all__ = [
    "make_console",
    "make_table",
    "show_json",
    "show_line",
    "show_prose",
    "show_table",
    "show_tiers_apart",
]

_WIDEST = 1000


def show_json(value: object) -> None:
    """Print ``value``, which is made of plain values."""
    typer.echo(json.dumps(value, indent=2))


def make_console() -> Console:
    """Return what prints to stdout, which shows names as they are.

    Lines that nobody reads on a terminal have no end: what is cut out of a file or found with
    grep is whole. Who exports COLUMNS has asked for lines of that length.
    """
    columns = shutil.get_terminal_size((_WIDEST, 0)).columns
    return Console(width=columns, highlight=False, markup=False, emoji=False)


def make_table(*words: str, numbers: tuple[str, ...], narrow: bool = False) -> Table:
    """Return an empty table with a column per word and, to their right, one per number.

    Args:
        *words: Heads of columns of words.
        numbers: Heads of columns of numbers.
        narrow: Whether so many columns are to fit a terminal that they stand close together.
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


def show_table(console: Console, table: Table) -> None:
    """Print all columns of ``table``: what is narrower breaks the lines and loses nothing."""
    _show_lines(console, table, _width_of(console, table))


def show_tiers_apart(
    console: Console, *words: str, numbers: tuple[str, ...], tiers: Sequence[Sequence[str]]
) -> None:
    """Print a line for each of ``tiers``, or a column where the lines are too long.

    Args:
        console: Where to.
        *words: Heads of what of a tier is words, its name first.
        numbers: Heads of its figures.
        tiers: Of each all of these.
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
    """Print a line of prose, which goes on in the next one where it is too long."""
    lines = textwrap.fill(text, console.width, subsequent_indent="  ", break_long_words=False)
    console.print(Text(lines), soft_wrap=True)


def show_prose(console: Console, table: Table) -> None:
    """Print ``table``, whose last column is prose that goes on in the next line."""
    _show_lines(console, table, console.width)


def _width_of(console: Console, table: Table) -> int:
    """Return how many columns of a terminal all of ``table`` takes."""
    options = console.options.update(max_width=_WIDEST)
    return Measurement.get(console, options, table).maximum


def _show_lines(console: Console, table: Table, width: int) -> None:
    """Print ``table`` in ``width`` columns, without blanks at the ends of lines."""
    options = console.options.update(width=width)
    for segments in console.render_lines(table, options, pad=False):
        line = Text()
        for segment in segments:
            line.append(segment.text, segment.style)
        line.rstrip()
        console.print(line, soft_wrap=True)
