"""Start Python programs from a process that has imported what they need.

Imports are most of what a program costs. A forked program is still a process, and a session, of
its own: with its own settings and standard streams, and with an exit status.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

__all__ = ["Forked", "fork_for_requests", "start_server"]

ROOT = Path(__file__).parents[2]
REQUEST_NBYTES = 128 * 1024
MOST_FILES = 8
STREAMS = 3
"""Standard input, output and error."""


class Forked:
    """A program in a process of its own, with what tests need of ``Popen``.

    Args:
        server: The way to a process that forks.
        arguments: Of the program.
        files: Its standard streams, and the other files that it gets.
        environment: Its environment variables.
    """

    def __init__(
        self,
        server: socket.socket,
        arguments: Sequence[str],
        files: Sequence[int],
        environment: Mapping[str, str],
    ) -> None:
        self.args = arguments
        self.returncode: int | None = None
        self._ended = threading.Event()
        ours, theirs = os.pipe()
        request = json.dumps([dict(environment), list(arguments)]).encode()
        socket.send_fds(server, [request], [*files, theirs])
        os.close(theirs)
        status = os.fdopen(ours)
        self.pid = int(status.readline())
        threading.Thread(target=self._await_end, args=(status,), daemon=True).start()

    def poll(self) -> int | None:
        """Return the exit status once there is one, negative for a signal."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status."""
        self._ended.wait(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal unless the program has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the program unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _await_end(self, status: IO[str]) -> None:
        with status:
            self.returncode = int(status.readline())
        self._ended.set()


def start_server(module: str, settings: Mapping[str, str]) -> socket.socket:
    """Start ``module``, which calls :func:`fork_for_requests`; return the way to it.

    The server ends when this process closes the socket at its end, so it is not waited for.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    atexit.register(ours.close)
    pairs = [f"{name}={value}" for name, value in settings.items()]
    command = ["env", *pairs, sys.executable, "-m", module]
    with theirs:
        process = subprocess.Popen(
            command, stdin=theirs.fileno(), cwd=ROOT, start_new_session=True
        )
    process.returncode = 0
    return ours


# -- in the process that forks -----------------------------------------------------------------


def fork_for_requests(modules: Iterable[str]) -> tuple[list[str], list[int]]:
    """Import ``modules``, and fork for each request.

    Returns:
        In the process that is to run a program: the arguments, and the files besides the
        standard streams.
    """
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()
    tasks = [path.name for path in Path("/proc/self/task").iterdir()]
    assert len(tasks) == 1, "a thread does not survive a fork"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests = socket.socket(fileno=os.dup(0))
    while True:
        request, files, _, _ = socket.recv_fds(requests, REQUEST_NBYTES, MOST_FILES)
        if not request:
            sys.exit()
        if os.fork() == 0:
            requests.close()
            break
        for descriptor in files:
            os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *given, status = files
    _fork_and_report(given, status)
    environment, arguments = json.loads(request)
    os.environ.clear()  # noqa: TID251 - as exec does
    os.environ.update(environment)  # noqa: TID251
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    return arguments, given[STREAMS:]


def _fork_and_report(files: Sequence[int], status: int) -> None:
    """Return in a child, which writes its number; its parent writes how it ended."""
    if pid := os.fork():
        for descriptor in files:
            os.close(descriptor)
        _, end = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):
            os.write(status, f"{os.waitstatus_to_exitcode(end)}\n".encode())
        os._exit(0)
    os.setsid()
    os.write(status, f"{os.getpid()}\n".encode())  # from here on, its group can be killed
    os.close(status)
    for number, descriptor in enumerate(files[:STREAMS]):
        os.dup2(descriptor, number)
        os.close(descriptor)
