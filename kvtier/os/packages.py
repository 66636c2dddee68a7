"""Finds out which packages are installed, without importing the packages."""

from __future__ import annotations

from importlib import metadata
from typing import Final

__all__ = ["KVIKIO_PACKAGES", "installed_kvikio"]

KVIKIO_PACKAGES: Final = {"12": "kvikio-cu12", "13": "kvikio-cu13"}
"""Name of kvikio's package for each major version of CUDA."""


def installed_kvikio() -> list[str]:
    """Return which of :data:`KVIKIO_PACKAGES` are installed."""
    found = []
    for name in KVIKIO_PACKAGES.values():
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        found.append(name)
    return found
