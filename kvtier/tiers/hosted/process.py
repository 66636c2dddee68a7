"""Starting and ending the process that hosts a tier."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from kvtier.config import child_environment
from kvtier.errors import TierUnavailableError
from kvtier.tiers.hosted.frames import READ_NBYTES, Frame, FrameParser, decode_error
from kvtier.types import SharedMemory

__all__ = ["HostProcess", "Opened"]

_OPEN_TIMEOUT_S: Final = 600.0
_EXIT_TIMEOUT_S: Final = 5.0


class Opened(NamedTuple):
    """What a host says of a tier that it opened.

    Attributes:
        capacity_slots: How many slots the tier has.
        recovered: Frames of what survived from earlier runs, least recently used first.
    """

    capacity_slots: int
    recovered: deque[Frame]


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A running host that has its tier open.

    Attributes:
        process: The process.
        connection: The socket to it.
        parser: What came through it and was not taken yet.
    """

    process: subprocess.Popen[bytes]
    connection: socket.socket
    parser: FrameParser

    @classmethod
    def start(
        cls, tier: str, opening: dict[str, Any], memory: SharedMemory
    ) -> tuple[Self, Opened]:
        """Start a host and wait until its tier is open; blocks.

        Args:
            tier: The tier's name, for errors.
            opening: Options and context, as JSON.
            memory: The memory that both processes map.

        Returns:
            The process, and what it said until the tier was open.

        Raises:
            KvtierError: What the tier raised when it was opened.
            TierUnavailableError: The process ended, or did not answer.
        """
        here, there = socket.socketpair()
        parser = FrameParser()
        descriptors = (there.fileno(), memory.descriptor)
        arguments = [sys.executable, "-m", "kvtier.tiers.hosted.host", *map(str, descriptors)]
        with there:
            process = subprocess.Popen(
                [*arguments, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env=child_environment(),
            )
        try:
            here.settimeout(_OPEN_TIMEOUT_S)
            here.sendall(Frame({"op": "open", **opening}).encode())
            opened = _wait_until_open(here, parser)
        except BaseException as error:
            here.close()
            end(process)
            if isinstance(error, OSError | EOFError):
                raise TierUnavailableError(
                    tier,
                    f"its I/O process ended before the store was open, exit code "
                    f"{process.poll()}",
                ) from error
            raise
        here.setblocking(False)  # noqa: FBT003 - the standard library's signature
        return cls(process, here, parser), opened


def _wait_until_open(connection: socket.socket, parser: FrameParser) -> Opened:
    recovered: deque[Frame] = deque()
    while data := connection.recv(READ_NBYTES):
        for frame in parser.feed(data):
            match frame.header["op"]:
                case "recovered":
                    recovered.append(frame)
                case "opened":
                    return Opened(frame.header["capacity_slots"], recovered)
                case "refused":
                    raise decode_error(frame.header["error"])
                case _:
                    relog(frame)
    raise EOFError


def relog(frame: Frame) -> None:
    """Log what the host logged, as if it had happened here."""
    header = frame.header
    logging.getLogger(header["logger"]).log(header["level"], "%s", header["text"])


def end(process: subprocess.Popen[bytes]) -> bool:
    """Wait a while for ``process`` to end, kill it otherwise; blocks.

    Returns:
        Whether it ended. False means that it is stuck in a system call.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_TIMEOUT_S)
        return True
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_TIMEOUT_S)
        return True
    return False
