"""Bars for what takes a while in a store; on a terminal only, and never on stdout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

__all__ = ["pulse", "show_bars"]


def show_bars() -> Progress:
    """Return what shows a bar for each of its tasks, as a context manager."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def pulse(progress: Progress, what: str) -> Iterator[Callable[[], None]]:
    """Show that ``what`` is being done, for nobody knows how long; yields a sign of life."""
    task = progress.add_task(what, total=None)
    yield functools.partial(progress.advance, task)
    progress.update(task, total=1, completed=1)
