"""Create the RAM tier's anonymous memory file and allocate all its pages in advance.

A page has 4 KiB, or 2 MiB if it is a *huge page*. Direct I/O pins every page of its buffer. A
GiB has 262,144 normal pages or 512 huge pages. With huge pages, reading, writing and pinning
the memory take a quarter of the processor time. Linux keeps huge pages in a pool that the
administrator fills (``vm.nr_hugepages``). Huge pages are used if the pool has enough of them
for the whole tier.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from kvtier.errors import CapacityError
from kvtier.os.limits import huge_page_pool, memory_limits
from kvtier.os.memory import open_anonymous
from kvtier.units import format_size

__all__ = ["HugePages", "create_memory"]

HugePages = Literal["auto", "require", "off"]
"""Whether to use huge pages. ``auto`` uses them if enough are free; ``require`` refuses to
start if too few are free; ``off`` never uses them."""

_PROC = Path("/proc")
_SYS = Path("/sys")
_PREFAULT_STEP_NBYTES = 1 << 30


def create_memory(name: str, nbytes: int, huge_pages: HugePages) -> int:
    """Create an anonymous memory file with every page allocated.

    Args:
        name: Shown in ``/proc/PID/maps``.
        nbytes: Bytes of the file, rounded up to whole pages.
        huge_pages: Whether to use huge pages.

    Returns:
        The file's descriptor.

    Raises:
        CapacityError: There is not enough memory, or not enough huge pages.
    """
    if huge_pages != "off":
        descriptor = _create_huge(name, nbytes)
        if descriptor is not None:
            return descriptor
        if huge_pages == "require":
            pool = huge_page_pool(_PROC)
            raise CapacityError(
                f"the RAM tier needs {pool.needed(nbytes):,} free huge pages and there are "
                f"{pool.free:,}: as root, sysctl -w vm.nr_hugepages=N, best at boot, or set "
                "tiers[0].huge_pages to auto"
            )
    _require_memory(nbytes)
    descriptor = open_anonymous(name)
    try:
        _prefault(descriptor, nbytes)
    except OSError as error:
        os.close(descriptor)
        raise CapacityError(
            f"the RAM tier's {format_size(nbytes)} cannot be allocated ({error.strerror}): "
            "lower tiers[0].capacity"
        ) from error
    return descriptor


def _create_huge(name: str, nbytes: int) -> int | None:
    """Return a file of huge pages, or None if the pool has too few."""
    pool = huge_page_pool(_PROC)
    if not pool.holds(nbytes):
        return None
    descriptor = open_anonymous(name, huge_pages=True)
    try:
        _prefault(descriptor, pool.needed(nbytes) * pool.page_nbytes)
    except OSError:
        # Another process took the pages, or the control group allows fewer.
        os.close(descriptor)
        return None
    return descriptor


def _prefault(descriptor: int, nbytes: int) -> None:
    """Allocate every page now, because later allocations could delay or kill the engine."""
    os.ftruncate(descriptor, nbytes)
    offsets = range(0, nbytes, _PREFAULT_STEP_NBYTES)

    def allocate(offset: int) -> None:
        os.posix_fallocate(descriptor, offset, min(_PREFAULT_STEP_NBYTES, nbytes - offset))

    with ThreadPoolExecutor(min(len(offsets), 8)) as pool:
        for _ in pool.map(allocate, offsets):
            pass


def _require_memory(nbytes: int) -> None:
    """Check that this host and its control group have enough memory.

    Raises:
        CapacityError: The memory is too small; the message names the exceeded limit.
    """
    for limit in memory_limits(_PROC, _SYS):
        if nbytes > limit.free_bytes:
            raise CapacityError(
                f"the RAM tier needs {format_size(nbytes)} but {limit.name} leaves "
                f"{format_size(limit.free_bytes)}: lower tiers[0].capacity or raise the limit"
            )
