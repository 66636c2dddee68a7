"""The command line: checks before a start, and a look into what is stored."""

from __future__ import annotations

import errno
import os
import sys
from typing import Final

__all__ = ["main"]

_FAILED: Final = 2
_INTERRUPTED: Final = 130
"""128 and SIGINT, as shells say it."""
_CLOSED: Final = 141
"""128 and SIGPIPE: who read the output has seen enough."""


def main() -> None:
    """Run the command line and exit with its code.

    What is wrong with its input is a line ``error: ...`` per problem on stderr and exit code 2.
    An interrupt and a closed pipe, whenever they come, end it without a word; a full disk
    behind stdout is an error line. Anything else is a bug and keeps its traceback.
    """
    try:
        # Importing takes time, in which a person may interrupt the command.
        from kvtier.cli._run import run  # noqa: PLC0415

        code = run()
        if sys.stdout is not None:  # it is None if it was closed before the start
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except BrokenPipeError:
        _forget_output()
        code = _CLOSED
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        _forget_output()
        remedy = "make room, or write it elsewhere"
        sys.stderr.write(f"error: the output cannot be written: {error.strerror}; {remedy}\n")
        code = _FAILED
    sys.exit(code)


def _forget_output() -> None:
    """Keep the interpreter from trying again, on its way out, to write what is buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
