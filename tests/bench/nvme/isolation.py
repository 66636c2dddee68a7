"""Processes of their own: no peer shares an interpreter lock or a heap with another."""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from tests.bench.nvme.errors import BenchError

__all__ = ["IsolatedProcess"]

P = ParamSpec("P")
T = TypeVar("T")


class IsolatedProcess:
    """A fresh interpreter that runs one call at a time and idles in between.

    A context manager; leaving it by an exception kills the process.
    """

    def __init__(self) -> None:
        self._executor = ProcessPoolExecutor(
            max_workers=1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_prepare,
        )
        self._pid = 0

    def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``call`` there and return its result, or raise what it raised."""
        if not self._pid:
            self._pid = self._executor.submit(os.getpid).result()
        bound = functools.partial(call, *args, **kwargs)
        return self._executor.submit(_report_errors, bound).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._executor.shutdown()
        if self._pid:
            # What vLLM's tier leaves in shared memory when it is killed.
            leftover = Path(f"/dev/shm/vllm_offload_kvtier-bench-{self._pid}.mmap")
            leftover.unlink(missing_ok=True)


def _report_errors(call: Callable[[], T]) -> T:
    """Turn whatever ``call`` raises into something that survives being sent back."""
    try:
        return call()
    except Exception:  # noqa: BLE001 - reported to the parent, which ends the run
        raise BenchError(traceback.format_exc()) from None


def _prepare() -> None:
    """Let Ctrl-C end the process silently, and vLLM only speak up when something is wrong."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    logging.getLogger("vllm.triton_utils").setLevel(logging.ERROR)
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"  # noqa: TID251 - how vLLM is told
