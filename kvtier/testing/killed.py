"""Work that a process does until it is killed, as an engine may be."""

from __future__ import annotations

import asyncio
import multiprocessing
import traceback
import warnings
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any, Final

__all__ = ["run_and_kill"]

_TIMEOUT_S: Final = 60.0


def run_and_kill(
    work: Callable[[], Coroutine[Any, Any, object]],
    *,
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    """Run ``work`` in a forked process, then ``meanwhile`` in this one, then kill the process.

    The process gets SIGKILL and closes nothing.

    Args:
        work: What the process does, on an event loop of its own.
        meanwhile: What is done here while the process lives.

    Raises:
        AssertionError: ``work`` raised, or took too long.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, there), daemon=True)
    with warnings.catch_warnings():
        # A thread may hold a lock at a fork. The process does its work and ends nothing.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    there.close()
    try:
        problem = _hear(here)
        if problem:
            raise AssertionError(problem)
        meanwhile()
    finally:
        here.close()
        process.kill()
        process.join(_TIMEOUT_S)


def _hear(connection: Connection) -> str:
    """Return what went wrong in the process; empty if nothing did."""
    if not connection.poll(_TIMEOUT_S):
        return f"the other process was not done after {_TIMEOUT_S:g} s"
    try:
        return str(connection.recv())
    except EOFError:
        return "the other process ended early"


def _run(work: Callable[[], Coroutine[Any, Any, object]], connection: Connection) -> None:
    async def until_killed() -> None:
        await work()
        connection.send("")
        await asyncio.sleep(2 * _TIMEOUT_S)

    try:
        asyncio.run(until_killed())
    except BaseException:
        connection.send(traceback.format_exc())
        raise
