"""The demo is a program: pytest, which imports every module for its doctests, leaves it out."""

from __future__ import annotations

collect_ignore_glob = ["*.py"]
