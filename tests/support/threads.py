"""Wait for threads by their names."""

from __future__ import annotations

import threading

__all__ = ["join_threads"]


def join_threads(name: str, *, timeout_s: float = 10.0) -> None:
    """Wait until no thread is called ``name``."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(timeout_s)
            assert not thread.is_alive(), f"{name} still runs"
