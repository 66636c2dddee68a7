"""The RAM tier's memory, shared by the scheduler and every worker of one engine.

Workers copy KV blocks in and out of it, the scheduler's side moves whole slots between it and
slower tiers, and both are different processes. The memory is an anonymous file
(``memfd_create``) whose descriptor is handed over an abstract Unix socket named after the
engine:

* Neither has a name in a file system. Both vanish with the last process that uses them,
  however it ends; a SIGKILL at any moment, also during start, leaves nothing behind.
* Its size is not limited by how ``/dev/shm`` happens to be mounted, which in containers is
  64 MiB unless somebody thought of it. What does limit it, available memory and the control
  group, is checked beforehand (:mod:`kvtier.memory.backing`): the alternative is a SIGBUS or
  the OOM killer later.

The first worker creates the region and serves it until everybody else has it; the others
attach. Layout: ``slots`` slots of ``slot_nbytes`` bytes, then ``relay_slots`` more that are no
part of the RAM tier, then the :class:`~kvtier.memory.control.ControlBlock`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import logging
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Self

from kvtier.errors import CapacityError, UnsupportedError
from kvtier.iopool import start_thread
from kvtier.memory.backing import HugePages, create_memory
from kvtier.memory.control import ControlBlock
from kvtier.page_mapper import PageMapper
from kvtier.types import SharedMemory

__all__ = ["HostRegion", "RegionGeometry"]

logger = logging.getLogger(__name__)

_HELLO_NBYTES = 4096
_THANKS = b"+"
_THANKS_TIMEOUT_S = 10.0
_NAME_NBYTES = 90  # of the 108 that an address has, less what goes before it
_CREDENTIALS = struct.Struct("iII")  # a process, a user and a group


@dataclass(frozen=True, slots=True)
class RegionGeometry:
    """Shape of a host region; equal in every process or the region is refused.

    Attributes:
        slots: Number of slots.
        slot_nbytes: Bytes of one slot, a multiple of the page size.
        stripe_nbytes: Bytes of one stripe of a slot; stripe s begins at ``s * stripe_nbytes``.
        stripes: Stripes of a slot; which rank has which is said by
            :class:`~kvtier.memory.slot_layout.RankShare`.
        ranks: Workers of the engine.
        is_portable: Whether a slot's bytes mean the same to an engine with other ranks.
        content: What the bytes are, which only a worker can tell.
        relay_slots: Slots through which chunks go from one slower tier to another.
    """

    slots: int
    slot_nbytes: int
    stripe_nbytes: int
    stripes: int
    ranks: int
    is_portable: bool = False
    content: str = ""
    relay_slots: int = 0

    @property
    def payload_nbytes(self) -> int:
        """Bytes of the RAM tier's slots."""
        return self.slots * self.slot_nbytes

    @property
    def relay(self) -> range:
        """Numbers of the slots that are no part of the RAM tier."""
        return range(self.slots, self.slots + self.relay_slots)

    @property
    def shared_nbytes(self) -> int:
        """Bytes of all slots, which a tier's process moves chunks to and from."""
        return self.payload_nbytes + self.relay_slots * self.slot_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole region, control block included."""
        return self.shared_nbytes + ControlBlock.nbytes(self.slots, self.ranks)


class HostRegion:
    """A mapping of the shared region in this process.

    Attributes:
        geometry: The region's shape.
        control: What the workers report about slots.
    """

    def __init__(self, geometry: RegionGeometry, descriptor: int) -> None:
        self.geometry = geometry
        # All of the file, which may be longer: huge pages can only be unmapped as a whole.
        self._map = mmap.mmap(descriptor, 0)
        # After what may fail: as long as anybody has it, the memory is taken.
        self._descriptor = os.dup(descriptor)
        self._view = memoryview(self._map)[: geometry.nbytes]
        self.control = ControlBlock(
            self._view[geometry.shared_nbytes :], slots=geometry.slots, ranks=geometry.ranks
        )
        self._server: _Server | None = None
        self._mapper: PageMapper | None = None

    @classmethod
    def create(
        cls,
        name: str,
        geometry: RegionGeometry,
        *,
        attachers: int,
        timeout_s: float,
        huge_pages: HugePages = "auto",
    ) -> Self:
        """Create the region, with every page in place, and serve it under ``name``.

        Args:
            name: Unique to the engine on this host.
            geometry: The region's shape.
            attachers: How many other processes or threads will attach.
            timeout_s: How long to serve.
            huge_pages: Whether to take huge pages.

        Raises:
            CapacityError: There is not enough memory, or not enough huge pages.
            UnsupportedError: Another engine serves a region of this name.
        """
        listener = _listen(name)
        descriptor = -1
        try:
            descriptor = create_memory(f"kvtier-{_short(name)}", geometry.nbytes, huge_pages)
            region = cls(geometry, descriptor)
        except BaseException:
            listener.close()
            if descriptor >= 0:
                os.close(descriptor)
            raise
        region._server = _Server(name, listener, descriptor, geometry, attachers, timeout_s)
        return region

    @classmethod
    def attach(
        cls, name: str, geometry: RegionGeometry | None = None, *, timeout_s: float
    ) -> Self:
        """Map the region that the first worker serves under ``name``; waits for it.

        Args:
            name: Unique to the engine on this host.
            geometry: The shape it must have; None takes it as it is.
            timeout_s: How long to wait.

        Raises:
            CapacityError: Nobody served it in time, so its creation failed or is on another
                host.
            UnsupportedError: Its shape is another one, or another user serves it.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(ConnectionError, EOFError):
                descriptor, served = _receive(name, geometry, deadline)
                try:
                    return cls(served, descriptor)
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
        """Return the writable bytes of slot ``number``; relay slots come after the tier's."""
        nbytes = self.geometry.slot_nbytes
        return self._view[number * nbytes : (number + 1) * nbytes]

    @property
    def shared(self) -> SharedMemory:
        """All slots, for a process that is to map them."""
        return SharedMemory(self._descriptor, self._address, self.geometry.shared_nbytes)

    def map_pages(self) -> None:
        """Map all pages in the background: this process is going to touch every slot."""
        if self._mapper is None:
            self._mapper = PageMapper(self._address, self.geometry.nbytes)

    @property
    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def payload(self) -> memoryview:
        """The writable bytes of the RAM tier's slots."""
        return self._view[: self.geometry.payload_nbytes]

    def close(self) -> None:
        """Stop serving and unmap. Idempotent.

        The memory itself is freed when the last view onto it is gone, here and elsewhere.
        """
        if self._mapper is not None:
            self._mapper.close()
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
        start_thread(self._thread)

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
    return f"\0kvtier-region-{_short(name)}"


def _short(name: str) -> str:
    """Return what stands for ``name`` where a name has no more than some hundred bytes."""
    encoded = name.encode()
    if len(encoded) <= _NAME_NBYTES:
        return name
    return hashlib.blake2b(encoded, digest_size=32).hexdigest()


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


def _receive(
    name: str, geometry: RegionGeometry | None, deadline: float
) -> tuple[int, RegionGeometry]:
    """Return a descriptor of the region, which is the caller's to close, and its shape.

    Raises:
        ConnectionError: Nobody serves it yet, or the server went away.
        EOFError: So it did, before it handed anything over.
        UnsupportedError: Another user serves it, or its shape is another one.
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
        try:
            served = RegionGeometry(**json.loads(hello))
            _require_shape(name, served, geometry)
            peer.send(_THANKS)
        except BaseException:
            os.close(descriptors[0])  # as long as anybody has it, the memory is taken
            raise
    return descriptors[0], served


def _require_shape(name: str, served: RegionGeometry, geometry: RegionGeometry | None) -> None:
    """Raise unless the region served has the shape that is needed."""
    if geometry not in {None, served}:
        raise UnsupportedError(
            f"host region {name!r} has another shape: {served} instead of {geometry}; "
            "all processes of an engine must read the same configuration file"
        )


def _uid_of(peer: socket.socket) -> int:
    """Return the user at the other end, as the kernel knows it."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return int(uid)
