"""Limits of the machine: free memory, control groups, huge pages, free disk space."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = [
    "HugePagePool",
    "MemoryLimit",
    "allocated_nbytes",
    "free_disk_nbytes",
    "huge_page_pool",
    "memory_limits",
    "read_kernel_text",
]

_NO_LIMIT: Final = 1 << 60
"""Smallest limit that means "unlimited". Control groups of version 1 write a number near
2**63."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit on memory.

    Attributes:
        name: Name of the limit.
        free_bytes: Bytes that are still free under the limit.
    """

    name: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class HugePagePool:
    """The kernel's pool of huge pages of the default size.

    Attributes:
        page_nbytes: Bytes of one page; 0 on a kernel without huge pages.
        total: Number of pages in the pool.
        free: Number of pages that are neither in use nor reserved.
    """

    page_nbytes: int
    total: int
    free: int

    def needed(self, nbytes: int) -> int:
        """Return how many huge pages ``nbytes`` take; 0 on a kernel without huge pages."""
        return -(-nbytes // self.page_nbytes) if self.page_nbytes else 0

    def holds(self, nbytes: int) -> bool:
        """Return whether the pool has enough free pages for ``nbytes``."""
        return 0 < self.needed(nbytes) <= self.free


def memory_limits(proc: Path, sys: Path) -> list[MemoryLimit]:
    """Return the memory limits of this process, including those of control groups.

    Args:
        proc: Mount point of procfs.
        sys: Mount point of sysfs.
    """
    return [*_available(proc), *_group_limits(proc, sys / "fs/cgroup")]


def huge_page_pool(proc: Path) -> HugePagePool:
    """Return the kernel's pool of huge pages.

    Args:
        proc: Mount point of procfs.
    """
    figures = _meminfo(proc)
    return HugePagePool(
        page_nbytes=figures.get("Hugepagesize", 0) * 1024,
        total=figures.get("HugePages_Total", 0),
        free=figures.get("HugePages_Free", 0) - figures.get("HugePages_Rsvd", 0),
    )


def read_kernel_text(path: Path) -> str:
    """Return the stripped text of a short kernel file; empty if the file cannot be read."""
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""


def allocated_nbytes(directory: Path) -> int:
    """Return how many bytes of disk the files below ``directory`` use."""

    def allocated(path: Path) -> int:
        try:
            return path.lstat().st_blocks * 512
        except OSError:  # removed meanwhile, or not readable for this user
            return 0

    return sum(
        allocated(Path(parent, name))
        for parent, directories, files in os.walk(directory)
        for name in (*directories, *files)
    )


def free_disk_nbytes(directory: Path) -> int | None:
    """Return the free bytes of the disk at ``directory``; None if the disk reports no size.

    Raises:
        OSError: The file system failed.
    """
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def _meminfo(proc: Path) -> dict[str, int]:
    """Return the numbers in /proc/meminfo, most of them in KiB."""
    lines = read_kernel_text(proc / "meminfo").splitlines()
    parts = (line.partition(":") for line in lines)
    return {name: int(rest.split()[0]) for name, _, rest in parts}


def _available(proc: Path) -> Iterator[MemoryLimit]:
    available_kib = _meminfo(proc).get("MemAvailable")
    if available_kib is not None:
        yield MemoryLimit("available memory", available_kib * 1024)


def _group_limits(proc: Path, mounted: Path) -> Iterator[MemoryLimit]:
    """Yield the limits of this process's control groups and of their parents.

    In a container the kernel often names a group by its path on the host, although the root of
    the mount is the container's group. So missing paths are skipped, and the root is always
    read. File pages count as free, because the kernel can drop them.
    """
    for line in read_kernel_text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _limits(mounted, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            yield from _limits(mounted / "memory", path, *names)


def _limits(root: Path, path: str, limit: str, usage: str) -> Iterator[MemoryLimit]:
    inner = Path(path.lstrip("/"))
    for group in dict.fromkeys((inner, *inner.parents)):
        most, used = (
            read_kernel_text(root / group / limit),
            read_kernel_text(root / group / usage),
        )
        if most.isdecimal() and used.isdecimal() and int(most) < _NO_LIMIT:
            name = f"the control group's {limit}"
            free = int(most) - int(used) + _droppable_nbytes(root / group / "memory.stat")
            yield MemoryLimit(name, max(free, 0))


def _droppable_nbytes(statistics: Path) -> int:
    """Return the size of the page cache of a control group and its children, in bytes."""
    words = dict(line.split() for line in read_kernel_text(statistics).splitlines())
    prefix = "total_" if "total_active_file" in words else ""
    return sum(int(words.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
