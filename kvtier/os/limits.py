"""What the kernel says of memory, and of the limits on what this process may take of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["HugePagePool", "MemoryLimit", "huge_page_pool", "memory_limits", "words_of"]

_NO_LIMIT: Final = 1 << 60
"""Control groups of version 1 say "unlimited" with a number near 2**63."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit on memory.

    Attributes:
        name: What limits.
        free_bytes: What it leaves.
    """

    name: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class HugePagePool:
    """The kernel's reserve of huge pages of the usual size.

    Attributes:
        page_nbytes: Size of one; 0 on a kernel without them.
        total: Pages in the pool.
        free: Pages that nobody has and nobody was promised.
    """

    page_nbytes: int
    total: int
    free: int

    def needed(self, nbytes: int) -> int:
        """Return how many pages ``nbytes`` take; 0 on a kernel without them."""
        return -(-nbytes // self.page_nbytes) if self.page_nbytes else 0

    def holds(self, nbytes: int) -> bool:
        """Return whether there are enough for ``nbytes``."""
        return 0 < self.needed(nbytes) <= self.free


def memory_limits(proc: Path, sys: Path) -> list[MemoryLimit]:
    """Return the limits that are in force on memory, the control groups' included.

    Args:
        proc: Where procfs is mounted.
        sys: Where sysfs is mounted.
    """
    return [*_available(proc), *_group_limits(proc, sys / "fs/cgroup")]


def huge_page_pool(proc: Path) -> HugePagePool:
    """Return the kernel's pool of huge pages.

    Args:
        proc: Where procfs is mounted.
    """
    figures = _meminfo(proc)
    return HugePagePool(
        page_nbytes=figures.get("Hugepagesize", 0) * 1024,
        total=figures.get("HugePages_Total", 0),
        free=figures.get("HugePages_Free", 0) - figures.get("HugePages_Rsvd", 0),
    )


def words_of(path: Path) -> str:
    """Return what the kernel says in the short file ``path``; empty if it is not there."""
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""


def _meminfo(proc: Path) -> dict[str, int]:
    """Return the figures of /proc/meminfo as they stand there, most of them in KiB."""
    lines = words_of(proc / "meminfo").splitlines()
    parts = (line.partition(":") for line in lines)
    return {name: int(rest.split()[0]) for name, _, rest in parts}


def _available(proc: Path) -> Iterator[MemoryLimit]:
    available_kib = _meminfo(proc).get("MemAvailable")
    if available_kib is not None:
        yield MemoryLimit("available memory", available_kib * 1024)


def _group_limits(proc: Path, mounted: Path) -> Iterator[MemoryLimit]:
    """Yield the limits of this process's control groups and of those around them.

    Inside a container the path that the kernel names is often the host's, and what is mounted
    is the container's own group: paths that are not there are skipped, the root is not.
    Pages of files are free, for the kernel would drop them.
    """
    for line in words_of(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _limits(mounted, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            yield from _limits(mounted / "memory", path, *names)


def _limits(root: Path, path: str, limit: str, usage: str) -> Iterator[MemoryLimit]:
    inner = Path(path.lstrip("/"))
    for group in dict.fromkeys((inner, *inner.parents)):
        most, used = words_of(root / group / limit), words_of(root / group / usage)
        if most.isdecimal() and used.isdecimal() and int(most) < _NO_LIMIT:
            name = f"the control group's {limit}"
            free = int(most) - int(used) + _droppable_nbytes(root / group / "memory.stat")
            yield MemoryLimit(name, max(free, 0))


def _droppable_nbytes(statistics: Path) -> int:
    """Return the pages of files in a control group; version 1 counts children separately."""
    words = dict(line.split() for line in words_of(statistics).splitlines())
    prefix = "total_" if "total_active_file" in words else ""
    return sum(int(words.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
