"""Checks of memory for the RAM tier: free memory, locking limit, huge pages."""

from __future__ import annotations

import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.doctor._findings import Finding, Status
from kvtier.os.limits import HugePagePool, MemoryLimit
from kvtier.units import approximate_size

__all__ = ["Machine", "check_huge_pages", "check_locking", "check_memory"]

_ENGINE_NBYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Machine:
    """Paths of the kernel's file systems.

    Attributes:
        proc: Where procfs is mounted.
        sys: Where sysfs is mounted.
        dev: Where device nodes are.
    """

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")

    def count_gpus(self) -> int:
        """Return the number of CUDA devices that the driver reports, without loading CUDA."""
        names = (path.name for path in self.dev.glob("nvidia*"))
        return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in names)


def check_memory(
    ram_nbytes: int, limits: Sequence[MemoryLimit], *, engine_runs: bool
) -> Finding:
    """Check that the RAM tier fits into free memory and leaves some for the engine.

    Args:
        ram_nbytes: Bytes of the RAM tiers of all ranks.
        limits: The limits in force.
        engine_runs: Whether an engine has a store open; its RAM tier may then be in use.
    """
    check, key = "memory", "tiers[0].capacity"
    if not limits:
        reason = "the kernel does not report free memory"
        return Finding(check, Status.NOTE, reason, "mount /proc")
    tightest = min(limits, key=lambda limit: limit.free_bytes)
    reason = (
        f"the RAM tier needs {approximate_size(ram_nbytes)}, "
        f"{tightest.name} leaves {approximate_size(tightest.free_bytes)}"
    )
    left_nbytes = tightest.free_bytes - ram_nbytes
    if left_nbytes >= _ENGINE_NBYTES:
        return Finding(check, Status.OK, reason)
    if engine_runs:
        reason = f"{reason}; a running engine may hold its RAM tier already"
        return Finding(check, Status.NOTE, reason, "stop it and run this again", key)
    remedy = "lower the capacity or raise the limit: pinned memory cannot be swapped out"
    if left_nbytes < 0:
        return Finding(check, Status.PROBLEM, reason, remedy, key)
    return Finding(check, Status.WARNING, f"{reason}: little for the engine", remedy, key)


def check_locking(ram_nbytes: int, *, gpus: int, locked_nbytes: int | None = -1) -> Finding:
    """Check that this process may lock enough memory to pin the RAM tier.

    Args:
        ram_nbytes: Bytes of the RAM tier.
        gpus: Number of CUDA devices.
        locked_nbytes: Limit of locked memory; None for no limit, -1 for that of this process.
    """
    if locked_nbytes == -1:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        locked_nbytes = None if soft == resource.RLIM_INFINITY else soft
    limit = "unlimited" if locked_nbytes is None else approximate_size(locked_nbytes)
    if not gpus:
        return Finding("memlock", Status.OK, f"{limit}; no GPU here, nothing is pinned")
    if locked_nbytes is None or locked_nbytes >= ram_nbytes:
        return Finding("memlock", Status.OK, limit)
    reason = (
        f"{limit}, less than the RAM tier's {approximate_size(ram_nbytes)}: pinning it fails "
        "where the driver counts pinned memory as locked"
    )
    remedy = (
        "run ulimit -l unlimited; in Docker --ulimit memlock=-1; in systemd "
        "LimitMEMLOCK=infinity"
    )
    return Finding("memlock", Status.WARNING, reason, remedy)


def check_huge_pages(ram_nbytes: int, pool: HugePagePool, *, mode: str) -> Finding:
    """Check whether the RAM tier gets huge pages.

    Args:
        ram_nbytes: Bytes of the RAM tier.
        pool: The kernel's pool of huge pages.
        mode: ``tiers[0].huge_pages``.
    """
    check, key = "huge pages", "tiers[0].huge_pages"
    if mode == "off":
        return Finding(check, Status.OK, "off in the file")
    bad = Status.PROBLEM if mode == "require" else Status.NOTE
    file_nbytes = ram_nbytes + pool.page_nbytes  # one page for the other content of the file
    needed = pool.needed(file_nbytes)
    if not needed:
        status = Status.PROBLEM if mode == "require" else Status.OK
        return Finding(check, status, "this kernel has none", "write huge_pages: auto", key)
    reason = f"the RAM tier needs {needed:,}; {pool.free:,} are reserved and free"
    if pool.holds(file_nbytes):
        return Finding(check, Status.OK, reason)
    reason = f"{reason}: small pages make disk I/O take 1.4 times the processor time"
    total = pool.total + needed - pool.free
    remedy = f"run as root, best at boot: sysctl -w vm.nr_hugepages={total}"
    return Finding(check, bad, reason, remedy, key)
