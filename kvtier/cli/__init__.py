"""The command line ``kvtier``."""

from __future__ import annotations

import errno
import os
import sys
from typing import Final

__all__ = ["main"]

_FAILED: Final = 2
_INTERRUPTED: Final = 130
"""Exit code after Ctrl-C: 128 plus the number of SIGINT, as in shells."""
_CLOSED: Final = 141
"""Exit code after a closed pipe: 128 plus the number of SIGPIPE."""


def main() -> None:
    """Run the command line, then exit with the command's exit code.

    For bad input, stderr gets one line ``error: ...`` per problem, and the exit code is 2.
    After Ctrl-C or a closed pipe, stderr gets no message. If stdout is a file on a full disk,
    stderr gets an error line.
    Any other exception is a bug and keeps its traceback.
    """
    try:
        # The import takes time, and the user may press Ctrl-C during it.
        from kvtier.cli._app import run  # noqa: PLC0415

        code = run()
        if sys.stdout is not None:  # None if stdout was closed before the start
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
        remedy = "free space, or write it to another disk"
        sys.stderr.write(f"error: the output cannot be written: {error.strerror}; {remedy}\n")
        code = _FAILED
    sys.exit(code)


def _forget_output() -> None:
    """Discard buffered output, so that the interpreter does not write it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
