"""Finding calls that block the event loop.

Time would prove nothing: a read from the page cache takes microseconds, and the same read takes
seconds when a disk hangs. So calls are recognised by their names: system calls for files,
sockets and processes, SQL statements, sleeps, and waits for other threads. A call in C that an
extension makes by itself, such as a page fault of mapped memory, is not seen.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

__all__ = ["blocking_calls"]

_MODULES: Final = frozenset(["_io", "_sqlite3", "sqlite3"])
"""Modules whose every call may block."""
_SOCKET: Final = "_socket"
"""The module of sockets. Calls of one that does not block are not counted."""
_FUNCTIONS: Final = {
    "posix": frozenset(
        [
            "chmod",
            "chown",
            "copy_file_range",
            "fallocate",
            "fdatasync",
            "fstat",
            "fsync",
            "ftruncate",
            "link",
            "listdir",
            "listxattr",
            "lockf",
            "lstat",
            "mkdir",
            "open",
            "posix_fadvise",
            "posix_fallocate",
            "pread",
            "preadv",
            "pwrite",
            "pwritev",
            "read",
            "readlink",
            "readv",
            "remove",
            "rename",
            "replace",
            "rmdir",
            "scandir",
            "sendfile",
            "stat",
            "statvfs",
            "symlink",
            "sync",
            "system",
            "truncate",
            "unlink",
            "utime",
            "wait",
            "waitpid",
            "write",
            "writev",
        ]
    ),
    "fcntl": frozenset(["flock", "lockf"]),
    "mmap": frozenset(["flush"]),
    "select": frozenset(["epoll", "poll", "select"]),
    "time": frozenset(["sleep"]),
}
_WAITS: Final = frozenset(["_wait_for_tstate_lock", "join", "wait"])
"""Functions of ``threading`` that wait for another thread."""
_EXEMPT: Final = frozenset(["asyncio", "linecache", "logging", "selectors", "warnings"])
"""Modules of Python that may block: the loop itself, and what reports problems."""

_TRANSPARENT: Final = sys.stdlib_module_names | {"blockbuster"}
"""Modules that make a call for somebody else: Python's own, and what wraps system calls."""


@contextmanager
def blocking_calls() -> Iterator[list[str]]:
    """Collect the blocking calls that this thread makes in here, and where it makes them.

    Calls of the event loop itself are not counted.
    """
    found: list[str] = []

    def on_call(frame: types.FrameType, event: str, called: Any) -> None:  # noqa: ANN401 - as sys says
        if event == "c_call" and (name := _blocking_name(frame, called)):
            place = _caller(frame)
            if place is not None:
                found.append(f"{name} in {place}")

    before = sys.getprofile()
    sys.setprofile(on_call)
    try:
        yield found
    finally:
        sys.setprofile(before)


def _blocking_name(frame: types.FrameType, called: Any) -> str:  # noqa: ANN401 - as sys says
    """Return the name of a call in C if it blocks, else nothing."""
    owner = getattr(called, "__self__", None)
    kind = owner if isinstance(owner, types.ModuleType | type) else type(owner)
    module = getattr(called, "__module__", None) or getattr(kind, "__module__", "")
    name = called.__name__
    if module == "_thread":
        waits = frame.f_globals.get("__name__") == "threading"
        return "threading.wait" if waits and frame.f_code.co_name in _WAITS else ""
    if module == _SOCKET:
        blocks = getattr(owner, "gettimeout", lambda: None)() != 0
        return f"socket.{name}" if blocks and name not in {"gettimeout", "fileno"} else ""
    if module in _MODULES:
        in_memory = kind.__name__ in {"BytesIO", "StringIO"}
        return "" if in_memory else f"{module}.{name}"
    return f"{module}.{name}" if name in _FUNCTIONS.get(str(module), ()) else ""


def _caller(frame: types.FrameType | None) -> str | None:
    """Return who makes a call, as module and line; None for Python's own housekeeping."""
    starts_thread = False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        package = name.partition(".")[0]
        if package in _EXEMPT or starts_thread:
            return None
        if package not in _TRANSPARENT:
            return f"{name}:{frame.f_lineno}"
        starts_thread = name == "threading" and frame.f_code.co_name == "start"
        frame = frame.f_back
    return None
