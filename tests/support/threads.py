"""Threads of kvtier: wait for one by its name, and reach the loop of one."""

from __future__ import annotations

import asyncio
import threading

from kvtier.transfer import TransferEngine

__all__ = ["join_threads", "loop_of"]


def join_threads(name: str, *, timeout_s: float = 10.0) -> None:
    """Wait until no thread is called ``name``."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(timeout_s)
            assert not thread.is_alive(), f"{name} still runs"


def loop_of(engine: TransferEngine) -> asyncio.AbstractEventLoop:
    """Return the event loop of the engine's thread."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def note() -> None:
        loops.append(asyncio.get_running_loop())

    # The engine has no tier of this name, so this delays no job.
    assert engine.exclusively_each({"": note}, timeout_s=10)
    return loops[0]
