"""Who has a namespace open.

The lock is the kernel's, on an open file, so it goes when its holder goes, however that ends.
The file's text only names the holder for people: the engine, not the process that does its I/O.
An engine that was killed is gone at once while its I/O process finishes the calls it is in; a
restart waits for that, and only for that.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError, StoreLockedError
from kvtier.tiers.slab.direct_io import BlockIo, write_fully

__all__ = ["LOCK", "acquire", "name_holder", "try_acquire"]

LOCK: Final = "lock"
_HOLDER: Final = re.compile(r"pid (\d+) on host (\S+)")
_LINGER_TIMEOUT_S: Final = 10.0
_LINGER_POLL_S: Final = 0.02


def acquire(tier: str, directory: Path, io: BlockIo) -> int:
    """Take the lock of ``directory`` and return the descriptor that holds it; may block.

    Raises:
        StoreLockedError: Another engine has it, or the I/O of one that died takes too long.
        ConfigError: The file system has no locks.
        OSError: The file system failed.
    """
    path = directory / LOCK
    deadline = time.monotonic() + _LINGER_TIMEOUT_S
    while True:
        try:
            return try_acquire(path, io)
        except BlockingIOError:
            holder = path.read_bytes()[:200].decode("utf-8", "replace").strip()
            if _is_alive(holder) or time.monotonic() > deadline:
                printable = "".join(filter(str.isprintable, holder)) or "another process"
                raise StoreLockedError(tier, directory, printable) from None
            time.sleep(_LINGER_POLL_S)
        except OSError as error:
            if error.errno not in {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}:
                raise
            raise ConfigError(
                f"tier {tier}: the file system of {directory} has no locks; use a local disk"
            ) from error


def try_acquire(path: Path, io: BlockIo) -> int:
    """Take the lock at ``path`` and return the descriptor that holds it.

    Raises:
        BlockingIOError: It is taken.
        OSError: The file system failed.
    """
    fd = io.open(path, os.O_RDWR | os.O_CREAT)
    try:
        io.lock(fd, wait=False)
    except BaseException:
        io.close(fd)
        raise
    return fd


def name_holder(fd: int, owner_pid: int, io: BlockIo) -> None:
    """Write into the lock held by ``fd`` which engine it is held for.

    Raises:
        OSError: The file system failed.
    """
    since = datetime.now(UTC).isoformat(timespec="seconds")
    text = f"pid {owner_pid} on host {socket.gethostname()} since {since}\n"
    io.truncate(fd, 0)
    write_fully(io, fd, [memoryview(text.encode())], 0)


def _is_alive(holder: str) -> bool:
    """Return whether ``holder`` may still be running; a text nobody understands counts so."""
    named = _HOLDER.match(holder)
    if named is None or named[2] != socket.gethostname():
        return True
    return Path(f"/proc/{named[1]}").exists()
