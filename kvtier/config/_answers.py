"""What a tier's section tells the commands about the tier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

__all__ = ["LocalStore", "Remark"]


@dataclass(frozen=True, slots=True)
class LocalStore:
    """A directory of this machine that a tier fills.

    Attributes:
        path: The directory. The tier creates it if its parent exists.
        key: The key of the tier's section that names it.
        direct_io: Whether the tier bypasses the page cache; None if that is not known.
    """

    path: Path
    key: str = "path"
    direct_io: Literal["auto", "require", "off"] | None = None


class Remark(NamedTuple):
    """A warning about one key of a tier's section."""

    key: str
    """The key, as a file writes it."""
    problem: str
    """What is wrong."""
    remedy: str
    """What to do about it."""
