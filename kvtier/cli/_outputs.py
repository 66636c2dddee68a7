"""Files that a command writes: looked at before anything is read or run for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from kvtier.errors import ConfigError

__all__ = ["check_outputs", "write_output"]

_REMEDY = "name a file in a directory you may write to"


def check_outputs(outputs: Mapping[str, Path | None], traces: Iterable[Path]) -> None:
    """Make sure that the files can be written, and that nothing is lost by it.

    Args:
        outputs: The files, by option; None where the option is not given.
        traces: What the command reads.

    Raises:
        ConfigError: One cannot be written, is one of the traces, or is named twice.
    """
    taken = [(trace, "the trace itself") for trace in traces]
    for option, path in outputs.items():
        if path is None:
            continue
        _check_writable(option, path)
        for other, what in taken:
            if _is_one_file(path, other):
                raise ConfigError(f"{option} {path}: is {what}; name another file")
        taken.append((path, f"the file of {option} as well"))


def write_output(option: str, path: Path, write: Callable[[Path], None]) -> None:
    """Write one file.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        write(path)
    except OSError as error:
        raise _refusal(option, path, error.strerror or str(error)) from error


def _check_writable(option: str, path: Path) -> None:
    try:
        problem = _obstacle(path)
    except OSError as error:  # a directory above may not be entered, or the name is too long
        raise _refusal(option, path, error.strerror or str(error)) from error
    if problem:
        raise _refusal(option, path, problem)


def _obstacle(path: Path) -> str:
    """Return why ``path`` cannot be written; empty if it can."""
    if path.is_dir():
        return "is a directory"
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "permission denied"
    return ""


def _is_one_file(path: Path, other: Path) -> bool:
    """Return whether both name one file, through links or not; devices keep nothing."""
    try:
        if path.exists() and other.exists():
            return path.is_file() and path.samefile(other)
        return path.resolve() == other.resolve()
    except OSError:  # the trace may not be looked at, which reading it says
        return False


def _refusal(option: str, path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{option} {path}: cannot be written: {problem}; {_REMEDY}")
