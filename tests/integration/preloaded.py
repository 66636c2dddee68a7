"""Start Python programs from a process that has imported vLLM.

Importing vLLM takes ten seconds of one core, and starting an engine after that takes one. A
program is still a process, and a session, of its own: with its own settings and standard
streams, and with the exit status of a Python of its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO

from tests.demo.runner import SETTINGS

__all__ = ["Program"]

ROOT = Path(__file__).parents[2]
MODULES = (
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama",
    "vllm.v1.worker.cpu_worker",
    "compressed_tensors.quantization",
)
REQUEST_NBYTES = 128 * 1024
STREAMS = 4
"""Of a program: standard input, output and error, and where its status goes."""


class Program:
    """A program in a process of its own, with what tests need of ``Popen``.

    Args:
        command: As ``env`` takes it: settings, this Python, ``-m`` and a module, arguments.
        log: Where standard error goes; None for where standard output goes.
    """

    def __init__(self, command: Sequence[str], log: IO[bytes] | None) -> None:
        self._command = command
        self._ended = threading.Event()
        self.returncode: int | None = None
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        ours_status, theirs_status = os.pipe()
        streams = [theirs_in, theirs_out, log.fileno() if log else theirs_out, theirs_status]
        socket.send_fds(parent(), [request_of(command)], streams)
        for descriptor in (theirs_in, theirs_out, theirs_status):
            os.close(descriptor)
        self.stdin = os.fdopen(ours_in, "w")
        self.stdout = os.fdopen(ours_out, errors="replace")
        status = os.fdopen(ours_status)
        self.pid = int(status.readline())
        threading.Thread(target=self._await_end, args=(status,), daemon=True).start()

    def poll(self) -> int | None:
        """Return the exit status once there is one, negative for a signal."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status."""
        self._ended.wait(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal unless the program has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _await_end(self, status: IO[str]) -> None:
        with status:
            self.returncode = int(status.readline())
        self._ended.set()


def request_of(command: Sequence[str]) -> bytes:
    """Return the environment that a command for ``env`` asks for, its module and arguments."""
    python = command.index(sys.executable)
    settings = dict(pair.split("=", 1) for pair in command[1:python])
    environment = {**os.environ, **settings}  # noqa: TID251 - of another process
    return json.dumps([environment, command[python + 2 :]]).encode()


@cache
def parent() -> socket.socket:
    """Start the process that imports vLLM, and return the way to it, which ends it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # A library that has begun to compute with several threads cannot be forked.
    settings = [
        f"{name}={value}" for name, value in (SETTINGS | {"OMP_NUM_THREADS": "1"}).items()
    ]
    command = ["env", *settings, sys.executable, "-m", "tests.integration.preloaded"]
    with theirs:
        # It ends with this process, so it is not waited for.
        process = subprocess.Popen(
            command, stdin=theirs.fileno(), cwd=ROOT, start_new_session=True
        )
    process.returncode = 0
    return ours


# -- in the process that has imported vLLM -----------------------------------------------------


def main() -> None:
    """Import vLLM, and fork for each command; return in the process that is to run it."""
    gc.disable()
    for module in MODULES:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()
    # As on GPUs; on CPUs vLLM would have each rank and each engine core import vLLM again.
    vars(importlib.import_module("vllm.envs"))["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    tasks = [path.name for path in Path("/proc/self/task").iterdir()]
    assert len(tasks) == 1, "a thread does not survive a fork"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests = socket.socket(fileno=os.dup(0))
    while True:
        request, streams, _, _ = socket.recv_fds(requests, REQUEST_NBYTES, STREAMS)
        if not request:
            sys.exit()
        if os.fork() == 0:
            requests.close()
            break
        for descriptor in streams:
            os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    fork_and_report(*streams)
    environment, sys.argv = json.loads(request)
    os.environ.clear()  # noqa: TID251 - as exec does
    os.environ.update(environment)  # noqa: TID251
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]


def fork_and_report(*streams: int) -> None:
    """Return in a child with these standard streams; its parent writes its number and end."""
    *standard, status = streams
    if pid := os.fork():
        for descriptor in standard:
            os.close(descriptor)
        with contextlib.suppress(BrokenPipeError):
            os.write(status, f"{pid}\n".encode())
            _, end = os.waitpid(pid, 0)
            os.write(status, f"{os.waitstatus_to_exitcode(end)}\n".encode())
        os._exit(0)
    os.close(status)
    os.setsid()
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
    for descriptor in set(standard):
        os.close(descriptor)


if __name__ == "__main__":
    main()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
