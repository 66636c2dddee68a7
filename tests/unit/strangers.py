"""Files of another user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["STRANGER", "give_away"]

STRANGER = 1002


def give_away(*paths: Path) -> None:
    """Let ``paths`` belong to another user, or skip the test."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    for path in paths:
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
