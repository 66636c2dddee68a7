"""The RAM tier's memory, shared by the scheduler and every worker of one engine.

Workers copy KV blocks in and out of it, the scheduler's side moves whole slots between it and
slower tiers, and both are different processes. The memory is an anonymous file
(``memfd_create``) whose descriptor is handed over a socket (:mod:`kvtier.memory.hand_over`):

* It has no name in a file system, and vanishes with the last process that uses it, however
  that ends; a SIGKILL at any moment, also during start, leaves no memory behind.
* Its size is not limited by how ``/dev/shm`` happens to be mounted, which in containers is
  64 MiB unless somebody thought of it. What does limit it, available memory and the control
  group, is checked beforehand (:mod:`kvtier.memory.backing`): the alternative is a SIGBUS or
  the OOM killer later.
* It is in no core dump, for it is made from the prompts of users.

The first worker creates the region and serves it until everybody else has it; the others
attach. Layout: ``slots`` slots of ``slot_nbytes`` bytes, then ``bounce_slots`` more that are no
part of the RAM tier, then the :class:`~kvtier.memory.control.ControlBlock`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from typing import Self

from kvtier.errors import CapacityError
from kvtier.memory.backing import HugePages, create_memory
from kvtier.memory.control import ControlBlock
from kvtier.memory.hand_over import Listener, RegionServer, receive_region
from kvtier.memory.slot_layout import RegionGeometry
from kvtier.os.memory import PageMapper, map_shared
from kvtier.types import SharedMemory

__all__ = ["HostRegion"]

_MEMORY_NAME_CHARS = 60  # of the 249 bytes that a memory file's name may have


class HostRegion:
    """A mapping of the shared region in this process.

    Attributes:
        geometry: The region's shape.
        control: What the workers report about slots.
    """

    def __init__(self, geometry: RegionGeometry, descriptor: int) -> None:
        self.geometry = geometry
        # All of the file, which may be longer: huge pages can only be unmapped as a whole.
        self._map = map_shared(descriptor)
        # After what may fail: as long as anybody has it, the memory is taken.
        self._descriptor = os.dup(descriptor)
        self._view = memoryview(self._map)[: geometry.nbytes]
        self.control = ControlBlock(
            self._view[geometry.shared_nbytes :], slots=geometry.slots, ranks=geometry.ranks
        )
        self._server: RegionServer | None = None
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
            UnsupportedError: Another engine of this user serves a region of this name, or there
                is no directory that only this user may enter.
        """
        with contextlib.ExitStack() as stack:
            listener = Listener(name)
            stack.callback(listener.close)
            label = f"kvtier-{name[:_MEMORY_NAME_CHARS]}"
            descriptor = create_memory(label, geometry.nbytes, huge_pages)
            stack.callback(os.close, descriptor)
            region = cls(geometry, descriptor)
            stack.callback(region.close)
            region._server = RegionServer(listener, descriptor, geometry, attachers, timeout_s)
            stack.pop_all()
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
            UnsupportedError: Its shape is another one, another user serves it, or there is no
                directory that only this user may enter.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(ConnectionError, EOFError, FileNotFoundError):
                descriptor, served = receive_region(name, geometry, deadline)
                try:
                    return cls(served, descriptor)
                finally:
                    os.close(descriptor)
            if time.monotonic() >= deadline:
                raise CapacityError(
                    f"no host region {name!r} appeared within {timeout_s:.0f} s: the first "
                    "worker failed to create it (see its log), has another TMPDIR, or runs on "
                    "another host, which kvtier does not support yet"
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
