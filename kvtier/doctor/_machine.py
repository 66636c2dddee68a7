"""Where the probes look, so that a test can point them elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Machine", "words_of"]


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


def words_of(path: Path) -> str:
    """Return what the kernel says in the one-line file ``path``; empty if it is not there."""
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""
