"""Files of another user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

__all__ = ["OTHER_UID", "give_away"]

OTHER_UID = 1002


def give_away(*paths: Path) -> None:
    """Let ``paths`` belong to another user, or skip the test."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    for path in paths:
        os.chown(path, OTHER_UID, OTHER_UID, follow_symlinks=False)
