"""Memory for the RAM tier, and the limits of a process that pins and maps it."""

from __future__ import annotations

import os
import re
import resource
from dataclasses import dataclass
from typing import Final

from kvtier.doctor._finding import Finding, Verdict
from kvtier.doctor._machine import Machine
from kvtier.os.limits import HugePagePool, MemoryLimit
from kvtier.units import approximate_size

__all__ = [
    "ProcessLimits",
    "check_memory",
    "check_open_files",
    "check_pages",
    "check_pinning",
    "check_shared_memory",
    "comes_in_huge_pages",
    "find_gpus",
    "process_limits",
    "shared_memory_nbytes",
]

_ENGINE_NBYTES: Final = 1 << 30
_SHM_NBYTES: Final = 512 << 20
_OPEN_FILES: Final = 1024


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits of this process; None is none.

    Attributes:
        locked_bytes: Memory it may lock (``ulimit -l``).
        open_files: Descriptors it may have open (``ulimit -n``).
    """

    locked_bytes: int | None
    open_files: int | None


def process_limits() -> ProcessLimits:
    """Return the limits of this process."""
    return ProcessLimits(
        _soft_limit(resource.RLIMIT_MEMLOCK), _soft_limit(resource.RLIMIT_NOFILE)
    )


def find_gpus(machine: Machine) -> list[str]:
    """Return the CUDA devices that the driver shows, without loading CUDA."""
    return sorted(
        path.name
        for path in machine.dev.glob("nvidia*")
        if re.fullmatch(r"nvidia\d+", path.name)
    )


def shared_memory_nbytes(machine: Machine) -> int:
    """Return the size of ``/dev/shm``."""
    status = os.statvfs(machine.dev / "shm")
    return status.f_blocks * status.f_frsize


def check_memory(ram_bytes: int, limits: list[MemoryLimit], *, engine_runs: bool) -> Finding:
    """Say whether the RAM tier fits what memory is left, with something left for the engine.

    Args:
        ram_bytes: Capacity of the RAM tier.
        limits: The limits in force.
        engine_runs: Whether an engine has one of the stores open, so that its RAM tier is
            probably gone from the memory that is left.
    """
    check, key = "memory", "tiers[0].capacity"
    if not limits:
        found = "nothing says how much memory is left"
        return Finding(check, Verdict.NOTE, found, "mount /proc", key)
    tightest = min(limits, key=lambda limit: limit.free_bytes)
    found = (
        f"{tightest.name} leaves {approximate_size(tightest.free_bytes)}, the RAM tier takes "
        f"{approximate_size(ram_bytes)}"
    )
    remedy = "lower tiers[0].capacity, or raise the limit"
    left_bytes = tightest.free_bytes - ram_bytes
    if left_bytes >= _ENGINE_NBYTES:
        return Finding(check, Verdict.OK, found, key=key)
    if engine_runs:
        found = f"{found}; an engine runs here, and its RAM tier may be in use already"
        remedy = "ask again when it is stopped"
        return Finding(check, Verdict.NOTE, found, remedy, key)
    verdict = Verdict.WARNING if left_bytes >= 0 else Verdict.PROBLEM
    if verdict is Verdict.WARNING:
        found = f"{found}: little is left for the engine"
    return Finding(check, verdict, found, remedy, key)


def check_pinning(ram_bytes: int, locked_bytes: int | None, *, gpus: int) -> Finding:
    """Say whether the RAM tier may be pinned.

    Args:
        ram_bytes: Capacity of the RAM tier.
        locked_bytes: What the process may lock; None for no limit.
        gpus: CUDA devices here.
    """
    check = "memlock"
    limit = "unlimited" if locked_bytes is None else approximate_size(locked_bytes)
    if not gpus:
        return Finding(check, Verdict.OK, f"{limit}; no GPU here, so nothing is pinned")
    if locked_bytes is None or locked_bytes >= ram_bytes:
        return Finding(check, Verdict.OK, limit)
    found = (
        f"{limit}, less than the RAM tier's {approximate_size(ram_bytes)}: where the driver "
        "counts pinned memory, the start fails"
    )
    remedy = "ulimit -l unlimited; in Docker --ulimit memlock=-1; in systemd LimitMEMLOCK="
    return Finding(check, Verdict.WARNING, found, f"{remedy}infinity")


def check_open_files(open_files: int | None) -> Finding:
    """Say whether the process may open enough files and sockets."""
    if open_files is None or open_files >= _OPEN_FILES:
        found = "unlimited" if open_files is None else f"{open_files:,}"
        return Finding("open files", Verdict.OK, found)
    found = f"{open_files:,}: kvtier needs a few dozen, the engine one per connection"
    return Finding("open files", Verdict.WARNING, found, "ulimit -n 65536")


def comes_in_huge_pages(ram_bytes: int, pool: HugePagePool) -> bool:
    """Return whether ``pool`` has enough for a RAM tier that takes huge pages."""
    return pool.holds(_file_nbytes(ram_bytes, pool))


def check_pages(ram_bytes: int, pool: HugePagePool, *, wanted: str) -> Finding:
    """Say in which pages the RAM tier comes.

    Args:
        ram_bytes: Capacity of the RAM tier.
        pool: The kernel's pool of huge pages.
        wanted: ``tiers[0].huge_pages``.
    """
    check, key = "huge pages", "tiers[0].huge_pages"
    needed = pool.needed(_file_nbytes(ram_bytes, pool))
    if wanted == "off":
        return Finding(check, Verdict.OK, "not asked for")
    if not needed:
        verdict = Verdict.PROBLEM if wanted == "require" else Verdict.OK
        return Finding(check, verdict, "the kernel has none", "set it to auto", key)
    found = f"{pool.free:,} huge pages reserved and free; the RAM tier takes {needed:,}"
    if comes_in_huge_pages(ram_bytes, pool):
        return Finding(check, Verdict.OK, found)
    verdict = Verdict.PROBLEM if wanted == "require" else Verdict.NOTE
    found = f"{found}: in small pages disk I/O takes about 1.4 times the processor time"
    remedy = (
        f"as root, best at boot: sysctl -w vm.nr_hugepages={pool.total + needed - pool.free}"
    )
    return Finding(check, verdict, found, remedy, key)


def check_shared_memory(size_bytes: int) -> Finding:
    """Say whether ``/dev/shm`` is large enough; only the engine's own processes use it."""
    check = "/dev/shm"
    size = approximate_size(size_bytes)
    if size_bytes >= _SHM_NBYTES:
        found = f"{size}; for vLLM's own processes, the RAM tier is not in it"
        return Finding(check, Verdict.OK, found)
    found = f"{size}: enough for kvtier, which does not use it, but vLLM's processes talk in it"
    remedy = "with several GPUs: docker run --shm-size=4g, or an emptyDir of medium Memory"
    return Finding(check, Verdict.WARNING, found, remedy)


def _file_nbytes(ram_bytes: int, pool: HugePagePool) -> int:
    """Return how much memory a RAM tier takes, with a page for what else is in its file."""
    return ram_bytes + pool.page_nbytes


def _soft_limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft
