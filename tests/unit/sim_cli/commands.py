"""``kvtier`` as a shell runs it, in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtier.cli._app import app
from kvtier.errors import KvtierError


def kvtier(*arguments: object, width: int = 100) -> str:
    """Run a command that works; return what it prints."""
    runner = CliRunner(env={"COLUMNS": str(width)})
    answer = runner.invoke(app, [str(word) for word in arguments])
    if answer.exception is not None:
        raise answer.exception
    return answer.stdout


def refusal(*arguments: object) -> str:
    """Run a command that is refused; return why."""
    with pytest.raises(KvtierError) as error:
        kvtier(*arguments)
    return str(error.value)


def sweep(trace: Path, *more: object) -> str:
    grid = ("--policies", "lru,arc", "--capacities", "5%,20")
    return kvtier("sim", "sweep", trace, *grid, "--csv", trace.with_suffix(".csv"), *more)
