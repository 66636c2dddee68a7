"""Where the probes look, so that a test can point them elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Machine"]


@dataclass(frozen=True, slots=True)
class Machine:
    """The roots of the kernel's reports.

    Attributes:
        proc: Where procfs is mounted.
        sys: Where sysfs is mounted.
        dev: Where device nodes are.
    """

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
