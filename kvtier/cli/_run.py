"""From what stands on the command line to an exit code."""

from __future__ import annotations

from typing import Any, Final

import typer

from kvtier.cli._app import app
from kvtier.errors import KvtierError
from kvtier.printable import printable

__all__ = ["run"]

_REFUSED: Final = 1
_FAILED: Final = 2
# typer has a click of its own, or, where it is older, click; it names the class in both.
_UsageError: Final[type[Any]] = typer.BadParameter.__mro__[1]


def run() -> int:
    """Run what the command line asks for; return the exit code.

    Raises:
        BrokenPipeError: Nobody reads the output any more.
        KeyboardInterrupt: Somebody interrupted it.
    """
    try:
        return app(prog_name="kvtier", standalone_mode=False) or 0
    except KvtierError as error:
        for line in str(error).split("\n"):
            typer.echo(f"error: {printable(line)}", err=True)
        return _FAILED
    except _UsageError as error:
        typer.echo(_usage(error), err=True)
        return _FAILED
    except typer.Abort:
        typer.echo("aborted", err=True)
        return _REFUSED
    except SystemExit as leaving:
        # typer and rich both make a closed pipe an exit with 1, which commands use themselves.
        if isinstance(leaving.__context__, BrokenPipeError):
            raise leaving.__context__ from None
        raise


def _usage(error: Any) -> str:  # noqa: ANN401 - of the class above
    """Return one line on what is wrong with the command line; the help if it is empty."""
    text = error.format_message()
    command = error.ctx.command_path if error.ctx else "kvtier"
    if text.startswith("Usage: "):
        return str(text)
    words = " ".join(text.split()).rstrip(".")
    return f"error: {words[:1].lower()}{words[1:]}; see {command} --help"
