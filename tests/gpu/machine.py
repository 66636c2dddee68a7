"""What the machine has: files of the kernel, packages, the CUDA driver."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["driver_has", "file_system", "output_of", "read_text", "versions"]


def read_text(path: str) -> str:
    """Return the text of a kernel's file; ``unknown`` if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "unknown"


def output_of(*command: str) -> str:
    """Return what a command prints, or why it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({type(error).__name__})"
    lines = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).split("\n")
    return "; ".join(filter(None, map(str.strip, lines)))[:300]


def file_system(directory: Path) -> str:
    """Return the type and the device of the file system that holds ``directory``."""
    number = directory.stat().st_dev
    place = f"{os.major(number)}:{os.minor(number)}"
    for line in read_text("/proc/self/mountinfo").splitlines():
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == place:
            kind, source, *_ = rest.split()
            return f"{kind} on {source}"
    return "unknown"


def versions(names: Sequence[str]) -> Iterator[str]:
    """Yield the version of each distribution in ``names``, without importing it."""
    for name in names:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"no {name}"


def driver_has(symbol: str, version: int) -> str:
    """Return whether the CUDA driver has ``symbol`` as of CUDA ``version``, such as 12080."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        find = driver.cuGetProcAddress_v2
    except (OSError, AttributeError) as absence:
        return f"unknown: {absence}"
    found, status = ctypes.c_void_p(), ctypes.c_int()
    driver.cuInit(0)
    error = find(
        symbol.encode(),
        ctypes.byref(found),
        ctypes.c_int(version),
        ctypes.c_uint64(0),
        ctypes.byref(status),
    )
    return "yes" if error == 0 and found.value else f"no (error {error}, {status.value})"
