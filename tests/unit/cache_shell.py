"""What a test asks ``kvtier cache``."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.unit.shell import Ran, Shell
from tests.unit.stores import KEYS

__all__ = ["CHANGING", "READING", "ROOT", "Ran", "Shell", "flat"]

ROOT: Final = Path(__file__).parents[2]
READING: Final = [["stat"], ["ls"], ["verify"], ["explain", KEYS[0].hex()]]
CHANGING: Final = [["evict", "--all", "--yes"], ["compact-index"]]


def flat(text: str) -> str:
    """Return ``text`` without the line breaks and blanks that a table's width puts in."""
    return " ".join(text.split())
