"""Progress bars on stderr, drawn only if stderr is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

__all__ = ["pulse", "show_bars", "show_progress"]


def show_bars() -> Progress:
    """Return a context manager that draws one progress bar per task."""
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
def show_progress(what: str) -> Iterator[Callable[[float], None]]:
    """Show one bar; yield a function that sets the bar's completed share, 0 to 1."""
    with show_bars() as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda share: progress.update(task, completed=share)


@contextmanager
def pulse(progress: Progress, what: str) -> Iterator[Callable[[], None]]:
    """Show a bar for work of unknown length; yield a function that moves the bar."""
    task = progress.add_task(what, total=None)
    yield partial(progress.advance, task)
    progress.update(task, total=1, completed=1)
