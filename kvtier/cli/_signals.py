"""Signals that end a command, for one that has something to clear away."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Final

__all__ = ["ended_in_order"]

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Let the body be left as by an exception where a signal would just end the process.

    Who is asked to end twice is ending already. A signal that is ignored, as ``nohup`` has it,
    stays ignored.

    Raises:
        SystemExit: A signal came; its code is 128 and the signal's number, as shells say it.
    """
    taken = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]

    def leave(number: int, _: FrameType | None) -> None:
        for one in taken:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in taken:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
