"""Page-locks the RAM tier's slots for a GPU.

A GPU's copy engines and kernels access page-locked memory directly. Other memory is copied
through a buffer of the driver, which is slower. The slots are page-locked in *segments*,
because drivers since R580 refuse to page-lock 512 GiB or more at once.

Each copy must lie within one segment. A segment ends where a slot ends, but a range to copy may
span adjacent slots. So :func:`cut` cuts ranges where a segment ends.

If the driver refuses a segment, the other segments are released, and the engine runs without
page-locked slots.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvtier.errors import CudaError
from kvtier.logs import get_logger
from kvtier.memory.cuda_api import Addresses
from kvtier.memory.fragments import Fragments
from kvtier.memory.slot_layout import RegionGeometry
from kvtier.memory.streams import Driver
from kvtier.units import approximate_size

__all__ = ["SEGMENT_NBYTES", "PinnedSlots", "cut"]

logger = get_logger(__name__)

SEGMENT_NBYTES: Final = 64 << 30
"""Largest number of bytes to page-lock at once."""


class PinnedSlots:
    """The RAM tier's slots, page-locked if the driver allows it.

    Args:
        driver: The GPU.
        address: Address of the first slot.
        geometry: Shape of the region.
        segment_nbytes: Largest number of bytes to page-lock at once. A segment has at least one
            slot.

    Attributes:
        edges: Addresses at which one segment ends and the next begins, ascending.
    """

    def __init__(
        self,
        driver: Driver,
        address: int,
        geometry: RegionGeometry,
        *,
        segment_nbytes: int = SEGMENT_NBYTES,
    ) -> None:
        self._driver = driver
        self._locked: list[int] = []
        step = max(segment_nbytes // geometry.slot_nbytes, 1) * geometry.slot_nbytes
        starts = range(0, geometry.payload_nbytes, step)
        self.edges: Addresses = address + np.array(starts[1:], np.int64)
        self._lock(address, starts, geometry.payload_nbytes)

    def _lock(self, address: int, starts: range, nbytes: int) -> None:
        """Page-lock the segments at offsets ``starts``; if one fails, unlock all and warn."""
        try:
            for start in starts:
                self._driver.register(address + start, min(starts.step, nbytes - start))
                self._locked.append(address + start)
        except CudaError as error:
            logger.warning(
                "the RAM tier of %s cannot be page-locked, so copies between it and the GPU "
                "are slower: segment %d of %d: %s",
                approximate_size(nbytes),
                len(self._locked) + 1,
                len(starts),
                error,
            )
            self.close()

    @property
    def is_locked(self) -> bool:
        """Whether all slots are page-locked."""
        return bool(self._locked)

    def close(self) -> None:
        """Release the memory. Idempotent; no copy may be running."""
        while self._locked:
            address = self._locked.pop()
            try:
                self._driver.unregister(address)
            except CudaError as error:
                logger.warning("page-locked memory was not released: %s", error)


def cut(fragments: Fragments, edges: Addresses) -> Fragments:
    """Split ``fragments`` at ``edges``, so that each lies within one page-locked segment.

    Args:
        fragments: The ranges to copy; each has at least one byte.
        edges: Host addresses at which one segment ends and the next begins, ascending.
    """
    if not len(edges):
        return fragments
    host, nbytes = fragments.host, fragments.nbytes
    following = np.searchsorted(edges, host, side="right")
    crosses = following != np.searchsorted(edges, host + nbytes, side="left")
    if not crosses.any():
        return fragments
    head = edges[following[crosses]] - host[crosses]
    heads = nbytes.copy()
    heads[crosses] = head
    both = Fragments(
        device=np.concatenate([fragments.device, fragments.device[crosses] + head]),
        host=np.concatenate([host, host[crosses] + head]),
        nbytes=np.concatenate([heads, nbytes[crosses] - head]),
    )
    return cut(both, edges)
