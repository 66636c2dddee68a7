"""Benchmarks are programs: pytest, which imports every module for its doctests, leaves them."""

from __future__ import annotations

collect_ignore_glob = ["*.py"]
