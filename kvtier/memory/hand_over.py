"""Send the host region's descriptor from an engine's first worker to the other processes.

The *region* is the memory of the RAM tier. vLLM starts the other processes, so they cannot
inherit the region's descriptor. The descriptor is sent through a Unix socket in a directory
that only this user may enter, below the directory for temporary files. So other users cannot
reach the socket, nor can containers with another directory for temporary files. An abstract
socket would be open to every process in the same network namespace.

If a serving process is killed, only the socket's file remains. The next server locks the
directory and removes this file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

from kvtier.errors import UnsupportedError
from kvtier.memory.slot_layout import RegionGeometry
from kvtier.os.iopool import start_thread
from kvtier.os.ownership import find_foreign_owner

__all__ = ["NOT_SERVED", "Listener", "RegionServer", "receive_region"]

NOT_SERVED: Final = (
    FileNotFoundError,
    ConnectionError,
    BlockingIOError,
    TimeoutError,
    EOFError,
)
"""Errors of :func:`receive_region` after which a later attempt may succeed."""

_HELLO_NBYTES = 4096
_THANKS = b"+"
_THANKS_TIMEOUT_S = 10.0
_LOCK_TIMEOUT_S = 10.0
_POLL_S = 0.02
_LONGEST_ACCEPT_S = 1.0
_CREDENTIALS = struct.Struct("iII")  # a process, a user and a group


class Listener:
    """A listening socket at a path that is derived from a region's name.

    Args:
        name: Unique to the engine on this host.

    Raises:
        UnsupportedError: Another engine of this user serves a region of this name, or no
            directory is private to this user.
    """

    def __init__(self, name: str) -> None:
        self.path = _socket_path(name)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with _locked(self.path.parent):
                _remove_dead(self.path.parent)
                self._bind(name)
        except BaseException:
            self.socket.close()
            raise

    def close(self) -> None:
        """Stop listening."""
        # In this order: after closing, the name may belong to another server.
        self.path.unlink(missing_ok=True)
        self.socket.close()

    def _bind(self, name: str) -> None:
        try:
            self.socket.bind(str(self.path))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UnsupportedError(
                    f"another engine of this user serves a host region {name!r} at "
                    f"{self.path}: give each engine its own engine_id in --kv-transfer-config"
                ) from error
            raise _cannot_use(self.path.parent, error.strerror or str(error)) from error
        self.socket.listen(64)


class RegionServer:
    """Sends a region's descriptor to every process that attaches, then ends.

    Args:
        listener: The listening socket; closed at the end.
        descriptor: The region's memory; closed at the end.
        geometry: The region's shape.
        attachers: Number of processes that will attach.
        timeout_s: Seconds to serve.
    """

    def __init__(
        self,
        listener: Listener,
        descriptor: int,
        geometry: RegionGeometry,
        attachers: int,
        timeout_s: float,
    ) -> None:
        self._listener = listener
        self._descriptor = descriptor
        self._hello = json.dumps(asdict(geometry)).encode()
        self._attachers = attachers
        self._deadline = time.monotonic() + timeout_s
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="kvtier-region", daemon=True)
        start_thread(self._thread)

    def close(self) -> None:
        """Stop sending the descriptor, and wait for the thread."""
        self._stopping = True
        # A connection wakes the server's thread, which waits in accept().
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as knock:
            with contextlib.suppress(OSError):
                knock.connect(str(self._listener.path))
            self._thread.join()

    def _serve(self) -> None:
        with contextlib.closing(self._listener), _closing_descriptor(self._descriptor):
            served = 0
            while served < self._attachers:
                left_s = self._deadline - time.monotonic()
                if left_s <= 0 or self._stopping:
                    return
                # If the name was removed, close() cannot wake this thread.
                self._listener.socket.settimeout(min(left_s, _LONGEST_ACCEPT_S))
                try:
                    peer, _ = self._listener.socket.accept()
                except TimeoutError:
                    continue
                except OSError:
                    return
                with peer:
                    served += self._hand_over(peer)

    def _hand_over(self, peer: socket.socket) -> bool:
        """Send the descriptor to a process of this user; return whether the process got it."""
        if self._stopping or _uid_of(peer) != os.geteuid():
            return False
        try:
            socket.send_fds(peer, [self._hello], [self._descriptor])
            peer.settimeout(_THANKS_TIMEOUT_S)
            # A process that died before it had the descriptor does not count.
            return peer.recv(1) == _THANKS
        except OSError:
            return False


def receive_region(
    name: str, geometry: RegionGeometry | None, deadline: float
) -> tuple[int, RegionGeometry]:
    """Return the region's descriptor and shape; the caller must close the descriptor.

    Args:
        name: Unique to the engine on this host.
        geometry: The shape that the region must have; None for any.
        deadline: Time of the monotonic clock, in seconds, at which to give up.

    Raises:
        FileNotFoundError: No process serves the region yet.
        ConnectionError: The server ended.
        BlockingIOError: Too many processes are attaching at once.
        TimeoutError: The server did not answer before the deadline.
        EOFError: The server ended before it sent the descriptor.
        UnsupportedError: Another user serves the region, the region's shape differs, or no
            directory is private to this user.
    """
    path = _socket_path(name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(max(deadline - time.monotonic(), 0.001))
        peer.connect(str(path))
        if _uid_of(peer) != os.geteuid():
            raise UnsupportedError(f"host region {name!r} at {path} is served by another user")
        hello, descriptors, _, _ = socket.recv_fds(peer, _HELLO_NBYTES, 1)
        if not descriptors:
            raise EOFError
        try:
            served = RegionGeometry(**json.loads(hello))
            _require_shape(name, served, geometry)
            peer.send(_THANKS)
        except BaseException:
            os.close(descriptors[0])  # an open descriptor keeps the memory
            raise
    return descriptors[0], served


def _socket_path(name: str) -> Path:
    """Return the path of a region's socket, in a directory that only this user may enter.

    Raises:
        UnsupportedError: No directory is private to this user.
    """
    directory = Path(tempfile.gettempdir()) / f"kvtier-{os.geteuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        stranger = find_foreign_owner([directory])
        if not stranger:
            directory.chmod(0o700)
    except OSError as error:
        raise _cannot_use(directory, error.strerror or str(error)) from error
    if stranger:
        raise _cannot_use(directory, stranger)
    # An address has room for 108 bytes, and a name may be longer.
    return directory / hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def _cannot_use(directory: Path, problem: str) -> UnsupportedError:
    return UnsupportedError(
        f"the RAM tier cannot be handed over in {directory}: {problem}; remove it, or name in "
        "TMPDIR a directory where every process of the engine may make files"
    )


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock ``directory``, so that no other engine creates or removes sockets in it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    problem = "another process keeps it locked"
                    raise _cannot_use(directory, problem) from error
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _remove_dead(directory: Path) -> None:
    """Remove the sockets of killed processes."""
    for path in filter(Path.is_socket, directory.iterdir()):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as knock:
            knock.setblocking(False)  # noqa: FBT003 - its signature
            try:
                knock.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue  # the socket's server is alive but busy


@contextlib.contextmanager
def _closing_descriptor(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def _require_shape(name: str, served: RegionGeometry, geometry: RegionGeometry | None) -> None:
    """Raise UnsupportedError unless the served region has the required shape."""
    if geometry not in {None, served}:
        raise UnsupportedError(
            f"host region {name!r} has another shape: {served} instead of {geometry}; "
            "all processes of an engine must read the same configuration file"
        )


def _uid_of(peer: socket.socket) -> int:
    """Return the user id of the process at the other end, as the kernel reports it."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return int(uid)
