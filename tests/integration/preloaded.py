"""Start Python programs from a process that has imported vLLM.

Importing vLLM takes ten seconds of one core, and starting an engine after that takes one.
"""

from __future__ import annotations

import importlib
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from functools import cache
from typing import IO, Self

from tests.demo.runner import SETTINGS
from tests.support.forking import Forked, fork_for_requests, start_server

__all__ = ["Program"]

MODULES = (
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.llama",
    "vllm.v1.worker.cpu_worker",
    "compressed_tensors.quantization",
)


class Program(Forked):
    """A program in a process of its own, with what tests need of ``Popen``.

    Args:
        command: As ``env`` takes it: settings, this Python, ``-m`` and a module, arguments.
        log: Where standard error goes; None for where standard output goes.
    """

    def __init__(self, command: Sequence[str], log: IO[bytes] | None) -> None:
        python = command.index(sys.executable)
        settings = dict(pair.split("=", 1) for pair in command[1:python])
        environment = {**os.environ, **settings}  # noqa: TID251 - of another process
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        streams = [theirs_in, theirs_out, log.fileno() if log else theirs_out]
        super().__init__(parent(), command[python + 2 :], streams, environment)
        for descriptor in (theirs_in, theirs_out):
            os.close(descriptor)
        self.stdin = os.fdopen(ours_in, "w")
        self.stdout = os.fdopen(ours_out, errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        self.stdin.close()
        self.stdout.close()

    def read(self, timeout_s: float) -> str:
        """Return what it prints until it ends."""
        output = self.stdout.read()
        self.wait(timeout_s)
        return output


@cache
def parent() -> socket.socket:
    """Start the process that imports vLLM, and return the way to it."""
    # A library that has begun to compute with several threads cannot be forked.
    return start_server("tests.integration.preloaded", SETTINGS | {"OMP_NUM_THREADS": "1"})


def main() -> None:
    """Return in the process that is to run a program."""
    sys.argv, _ = fork_for_requests(MODULES)
    # As on GPUs; on CPUs vLLM would have each rank and each engine core import vLLM again.
    vars(importlib.import_module("vllm.envs"))["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


if __name__ == "__main__":
    main()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
