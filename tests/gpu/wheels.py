"""Packages that a bare machine lacks, from the wheels that ``.ci/gpu_wheels`` fetched."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["unpack_missing"]


def unpack_missing(wheels: Path, site: Path) -> list[str]:
    """Unpack the wheels that this interpreter needs and lacks.

    A wheel is skipped if its distribution is installed in the same or a later version, or if it
    is for another version of Python. Unpacking needs neither pip nor a writable environment.

    Args:
        wheels: Directory of the wheels and of single modules; it need not exist.
        site: Where they go; a directory for ``PYTHONPATH``.

    Returns:
        The names of what was unpacked.
    """
    unpacked = []
    for wheel in sorted(wheels.glob("*.whl")):
        name, version, *_, python, abi, _ = wheel.stem.split("-")
        if _runs_here(python, abi) and not _is_installed(name, version):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
            unpacked.append(name)
    for module in sorted(wheels.glob("*.py")):
        site.mkdir(exist_ok=True)
        shutil.copy(module, site)
        unpacked.append(module.stem)
    return unpacked


def _runs_here(python: str, abi: str) -> bool:
    """Return whether a wheel with these tags is for this interpreter."""
    ours = sys.version_info[:2]
    for tag in python.split("."):
        stable = tag.startswith("cp3") and abi == "abi3" and (3, int(tag[3:])) <= ours
        if stable or tag in {"py3", f"cp{ours[0]}{ours[1]}"}:
            return True
    return False


def _is_installed(name: str, version: str) -> bool:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return list(_numbers(found)) >= list(_numbers(version))


def _numbers(version: str) -> Iterator[int]:
    return map(int, re.findall(r"\d+", version))
