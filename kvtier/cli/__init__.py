"""The command line: checks before a start, and a look into what is stored."""

from __future__ import annotations

import sys

import typer

from kvtier.cli._commands import app
from kvtier.errors import KvtierError

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line.

    What kvtier raises on purpose becomes a line ``error: ...`` per problem on stderr and exit
    code 2, the code that wrong usage has as well. Anything else is a bug and keeps its
    traceback.
    """
    try:
        app(prog_name="kvtier")
    except KvtierError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        sys.exit(2)
