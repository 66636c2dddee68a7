"""The RAM tier's memory, shared by the scheduler and every worker of one engine.

Workers copy KV blocks in and out of it, the scheduler's side moves whole slots between it and
slower tiers, and both are different processes. The memory is an anonymous file
(``memfd_create``) whose descriptor is handed over an abstract Unix socket named after the
engine:

* Neither has a name in a file system. Both vanish with the last process that uses them,
  however it ends; a SIGKILL at any moment, also during start, leaves nothing behind.
* Its size is not limited by how ``/dev/shm`` happens to be mounted, which in containers is
  64 MiB unless somebody thought of it. What does limit it, available memory and the control
  group, is checked beforehand: the alternative is a SIGBUS or the OOM killer later.

The first worker creates the region and serves it until everybody else has it; the others
attach. Layout: ``slots`` slots of ``slot_nbytes`` bytes, then the
:class:`~kvtier.memory.control.ControlBlock`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from kvtier.errors import CapacityError, UnsupportedError
from kvtier.memory.control import ControlBlock
from kvtier.types import SharedMemory
from kvtier.units import format_size

__all__ = ["HostRegion", "RegionGeometry"]

logger = logging.getLogger(__name__)

_PREFAULT_PIECE = 1 << 30
_HELLO_NBYTES = 4096
_THANKS = b"+"
_THANKS_TIMEOUT_S = 10.0
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class RegionGeometry:
    """Shape of a host region; equal in every process or the region is refused.

    Attributes:
        slots: Number of slots.
        slot_nbytes: Bytes of one slot, a multiple of the page size.
        shard_nbytes: Bytes of a slot that one rank owns; rank r's begin at
            ``r * shard_nbytes``.
        ranks: Workers of the engine.
    """

    slots: int
    slot_nbytes: int
    shard_nbytes: int
    ranks: int

    @property
    def payload_nbytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole region, control block included."""
        return self.payload_nbytes + ControlBlock.nbytes(self.slots, self.ranks)


class HostRegion:
    """A mapping of the shared region in this process.

    Attributes:
        geometry: The region's shape.
        control: What the workers report about slots.
    """

    def __init__(self, geometry: RegionGeometry, descriptor: int) -> None:
        self.geometry = geometry
        self._descriptor = os.dup(descriptor)
        self._map = mmap.mmap(descriptor, geometry.nbytes)
        self._view = memoryview(self._map)
        self.control = ControlBlock(
            self._view[geometry.payload_nbytes :], slots=geometry.slots, ranks=geometry.ranks
        )
        self._server: _Server | None = None

    @classmethod
    def create(
        cls, name: str, geometry: RegionGeometry, *, attachers: int, timeout_s: float
    ) -> Self:
        """Create the region, with every page in place, and serve it under ``name``.

        Args:
            name: Unique to the engine on this host.
            geometry: The region's shape.
            attachers: How many other processes or threads will attach.
            timeout_s: How long to serve.

        Raises:
            CapacityError: There is not enough memory.
            UnsupportedError: Another engine serves a region of this name.
        """
        listener = _listen(name)
        descriptor = -1
        try:
            _require_memory(geometry.nbytes)
            descriptor = os.memfd_create(f"kvtier-{name}", os.MFD_CLOEXEC)
            _prefault(descriptor, geometry.nbytes)
            region = cls(geometry, descriptor)
        except BaseException:
            listener.close()
            if descriptor >= 0:
                os.close(descriptor)
            raise
        region._server = _Server(name, listener, descriptor, geometry, attachers, timeout_s)
        return region

    @classmethod
    def attach(cls, name: str, geometry: RegionGeometry, *, timeout_s: float) -> Self:
        """Map the region that the first worker serves under ``name``; waits for it.

        Raises:
            CapacityError: Nobody served it in time, so its creation failed or is on another
                host.
            UnsupportedError: Its shape is another one, or another user serves it.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(ConnectionError, EOFError):
                descriptor = _receive(name, geometry, deadline)
                try:
                    return cls(geometry, descriptor)
                finally:
                    os.close(descriptor)
            if time.monotonic() >= deadline:
                raise CapacityError(
                    f"no host region {name!r} appeared within {timeout_s:.0f} s: the first "
                    "worker failed to create it (see its log), or runs on another host, which "
                    "kvtier does not support yet"
                )
            time.sleep(0.02)

    def slot(self, number: int) -> memoryview:
        """Return the writable bytes of slot ``number``."""
        nbytes = self.geometry.slot_nbytes
        return self._view[number * nbytes : (number + 1) * nbytes]

    @property
    def shared(self) -> SharedMemory:
        """The slots, for a process that is to map them."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        return SharedMemory(self._descriptor, address, self.geometry.payload_nbytes)

    @property
    def payload(self) -> memoryview:
        """The writable bytes of all slots."""
        return self._view[: self.geometry.payload_nbytes]

    def close(self) -> None:
        """Stop serving and unmap. Idempotent.

        The memory itself is freed when the last view onto it is gone, here and elsewhere.
        """
        if self._server is not None:
            self._server.close()
            self._server = None
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self.control.release()
        self._view.release()
        # Views handed out (tensors of a worker that is being torn down) keep the mapping alive;
        # it goes with them.
        with contextlib.suppress(BufferError):
            self._map.close()


class _Server:
    """Hands the region's descriptor to whoever attaches, then goes away."""

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        descriptor: int,
        geometry: RegionGeometry,
        attachers: int,
        timeout_s: float,
    ) -> None:
        self._name = name
        self._listener = listener
        self._descriptor = descriptor
        self._hello = json.dumps(asdict(geometry)).encode()
        self._attachers = attachers
        self._deadline = time.monotonic() + timeout_s
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="kvtier-region", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._stopping = True
        # Nothing but a connection wakes a thread that waits in accept.
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as knock:
            with contextlib.suppress(ConnectionError):
                knock.connect(_address(self._name))
            self._thread.join()

    def _serve(self) -> None:
        with self._listener, _closing_descriptor(self._descriptor):
            served = 0
            while served < self._attachers:
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    return
                self._listener.settimeout(left_s)
                try:
                    peer, _ = self._listener.accept()
                except OSError:
                    return
                with peer:
                    if self._stopping:
                        return
                    served += self._hand_over(peer)

    def _hand_over(self, peer: socket.socket) -> bool:
        """Give ``peer`` the descriptor, if it belongs to the same user and still listens."""
        if _uid_of(peer) != os.getuid():
            return False
        try:
            socket.send_fds(peer, [self._hello], [self._descriptor])
            peer.settimeout(_THANKS_TIMEOUT_S)
            # A process that died before it mapped the region leaves its place to another.
            return peer.recv(1) == _THANKS
        except OSError:
            return False


@contextlib.contextmanager
def _closing_descriptor(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def _address(name: str) -> str:
    return f"\0kvtier-region-{name}"


def _listen(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(_address(name))
        listener.listen(64)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UnsupportedError(
                f"another engine on this host serves a host region {name!r}: give each engine "
                "its own engine_id in --kv-transfer-config"
            ) from error
        raise
    return listener


def _receive(name: str, geometry: RegionGeometry, deadline: float) -> int:
    """Return a descriptor of the region.

    Raises:
        ConnectionError: Nobody serves it yet.
        EOFError: The server went away.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(max(deadline - time.monotonic(), 0.001))
        peer.connect(_address(name))
        if _uid_of(peer) != os.getuid():
            raise UnsupportedError(f"host region {name!r} is served by another user")
        try:
            hello, descriptors, _, _ = socket.recv_fds(peer, _HELLO_NBYTES, 1)
        except TimeoutError as error:
            raise EOFError from error
        if not descriptors:
            raise EOFError
        _require_shape(name, json.loads(hello), geometry, descriptors[0])
        peer.send(_THANKS)
    return descriptors[0]


def _require_shape(
    name: str, served: object, geometry: RegionGeometry, descriptor: int
) -> None:
    """Close ``descriptor`` and raise unless the region served has the shape that is needed."""
    if served != asdict(geometry):
        os.close(descriptor)
        raise UnsupportedError(
            f"host region {name!r} has another shape: {served} instead of {asdict(geometry)}; "
            "all processes of an engine must read the same configuration file"
        )


def _uid_of(peer: socket.socket) -> int:
    """Return the user at the other end, as the kernel knows it."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return int(uid)


def _prefault(descriptor: int, nbytes: int) -> None:
    """Allocate every page now: later it would cost the first request, or kill the engine."""
    os.ftruncate(descriptor, nbytes)
    offsets = range(0, nbytes, _PREFAULT_PIECE)

    def allocate(offset: int) -> None:
        os.posix_fallocate(descriptor, offset, min(_PREFAULT_PIECE, nbytes - offset))

    try:
        with ThreadPoolExecutor(min(len(offsets), 8)) as pool:
            for _ in pool.map(allocate, offsets):
                pass
    except OSError as error:
        raise CapacityError(
            f"the RAM tier's {format_size(nbytes)} cannot be allocated ({error.strerror}): "
            "lower tiers[0].capacity"
        ) from error


def _require_memory(nbytes: int) -> None:
    """Refuse a region that this host or its control group cannot hold.

    Raises:
        CapacityError: Too large; says what is available and by which limit.
    """
    for limit, available in _memory_limits():
        if nbytes > available:
            raise CapacityError(
                f"the RAM tier needs {format_size(nbytes)} but {limit} leaves "
                f"{format_size(available)}: lower tiers[0].capacity or raise the limit"
            )


def _memory_limits() -> Iterator[tuple[str, int]]:
    """Yield the limits in force and what each leaves, in bytes."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            yield "available memory", int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        used = int((group / "memory.current").read_text(encoding="ascii"))
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        counts = dict(map(str.split, (group / "memory.stat").open(encoding="ascii")))
        # Cached files count as used, but the kernel drops them before it kills anybody.
        cached = int(counts["active_file"]) + int(counts["inactive_file"])
        yield "the control group's memory.max", limit - used + cached
