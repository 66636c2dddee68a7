"""The host region: the RAM tier's memory, shared by all processes of an engine.

Worker processes copy KV blocks to and from the region. The scheduler's process moves whole
slots between the region and slower tiers. The memory is an anonymous file (``memfd_create``)
whose descriptor is sent over a socket (:mod:`kvtier.memory.hand_over`):

* It has no name in a file system and is freed with the last process that uses it. So a SIGKILL
  at any moment, even during the start, leaves no memory behind.
* Its size does not depend on the size of ``/dev/shm``, which is 64 MiB in most containers. The
  real limits are available memory and the limit of the control group. Both are checked first
  (:mod:`kvtier.memory.backing`): a larger region would cause a SIGBUS or wake the OOM killer.
* It is excluded from core dumps, because it holds users' prompts.

The first worker creates the region and serves it until the other processes have attached. The
region has, in this order, ``slots`` slots of ``slot_nbytes`` bytes, ``bounce_slots`` bounce
slots, and the :class:`~kvtier.memory.control.ControlBlock`.
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
from kvtier.memory.hand_over import NOT_SERVED, Listener, RegionServer, receive_region
from kvtier.memory.slot_layout import RegionGeometry
from kvtier.os.memory import PageMapper, map_shared
from kvtier.types import SharedMemory

__all__ = ["HostRegion"]

_MEMORY_NAME_CHARS = 60  # of the 249 bytes that a memory file's name may have


class HostRegion:
    """A mapping of the shared region in this process.

    Attributes:
        geometry: The region's shape.
        control: Status of the slots, written by the workers.
    """

    def __init__(self, geometry: RegionGeometry, descriptor: int) -> None:
        self.geometry = geometry
        # The file may be longer than the region: huge pages are unmapped as a whole.
        self._map = map_shared(descriptor)
        # After the calls that may fail, because an open descriptor keeps the memory allocated.
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
        """Create the region with every page allocated, and serve it under ``name``.

        Args:
            name: Unique to the engine on this host.
            geometry: The region's shape.
            attachers: Number of other processes or threads that will attach.
            timeout_s: Seconds to serve.
            huge_pages: Whether to use huge pages.

        Raises:
            CapacityError: There is not enough memory, or not enough huge pages.
            UnsupportedError: Another engine of this user serves a region of this name, or no
                directory is private to this user.
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
        """Wait until the first worker serves the region ``name``, then map the region.

        Args:
            name: Unique to the engine on this host.
            geometry: The shape that the region must have; None for any.
            timeout_s: Seconds to wait.

        Raises:
            CapacityError: No process served the region in time, because its creation failed or
                happened on another host.
            UnsupportedError: The region has another shape, another user serves the region, or
                no directory is private to this user.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(*NOT_SERVED):
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
        """Return the writable bytes of slot ``number``; bounce slots have the last numbers."""
        nbytes = self.geometry.slot_nbytes
        return self._view[number * nbytes : (number + 1) * nbytes]

    @property
    def shared(self) -> SharedMemory:
        """The memory of all slots, in a form that another process can map."""
        return SharedMemory(self._descriptor, self._address, self.geometry.shared_nbytes)

    def map_pages(self) -> None:
        """Map all pages in the background, because this process will touch every slot."""
        if self._mapper is None:
            self._mapper = PageMapper(self._address, self.geometry.nbytes)

    @property
    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def payload(self) -> memoryview:
        """The bytes of the RAM tier's slots, writable."""
        return self._view[: self.geometry.payload_nbytes]

    def close(self) -> None:
        """Stop serving and unmap. Idempotent.

        The memory is freed with the last view of it in any process.
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
        # When a worker is torn down, its tensors keep the mapping until they are freed.
        with contextlib.suppress(BufferError):
            self._map.close()
