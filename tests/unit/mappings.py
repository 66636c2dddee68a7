"""What the kernel says of a process' memory."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["flags_of_mappings"]

_MAPPING = re.compile("^[0-9a-f]+-[0-9a-f]+ ")


def flags_of_mappings(pid: int, file: str) -> list[list[str]]:
    """Return the flags (``VmFlags``) of the mappings of files whose name begins so."""
    flags: list[list[str]] = []
    concerns = False
    for line in Path(f"/proc/{pid}/smaps").read_text(errors="replace").splitlines():
        if _MAPPING.match(line):
            concerns = file in line
        elif concerns and line.startswith("VmFlags:"):
            flags.append(line.split()[1:])
    return flags
