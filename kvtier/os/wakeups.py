"""Wakes an event loop from other threads, at little cost to these threads."""

from __future__ import annotations

import asyncio
import ctypes
import os
import weakref
from collections.abc import Callable

__all__ = ["LoopWaker"]


class LoopWaker:
    """Calls a function on an event loop after a thread has called :meth:`wake`.

    ``loop.call_soon_threadsafe`` does the same, but releases the interpreter's lock while it
    writes to a socket. The woken thread takes the lock, and the caller waits until that thread
    waits for something else. This class writes without releasing the lock.

    Args:
        callback: The function. It is called at least once after each call of :meth:`wake`, and
            once after :meth:`attach`.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._is_waking = False
        self._write = ctypes.PyDLL(None).eventfd_write
        self._one = ctypes.c_uint64(1)
        self._event = -1

    def attach(self) -> None:
        """Attach to the running loop, and schedule a first call of the function there.

        Raises:
            OSError: The process or the machine has no file descriptor left.
        """
        # The count begins at 1, because an earlier wake-up was written to no file.
        self._event = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Closed only when no thread can call `wake`, which would write to another file.
        weakref.finalize(self, os.close, self._event).atexit = False
        asyncio.get_running_loop().add_reader(self._event, self._run)

    def wake(self) -> None:
        """Wake the loop; never blocks. Has no effect once the loop has ended."""
        if not self._is_waking:
            self._is_waking = True
            self._write(self._event, self._one)

    def _run(self) -> None:
        os.eventfd_read(self._event)
        self._is_waking = False  # before the call, so that a later `wake` causes another one
        self._callback()
