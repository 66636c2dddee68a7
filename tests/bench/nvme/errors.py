"""What the benchmark cannot work without."""

from __future__ import annotations

__all__ = ["BenchError"]


class BenchError(Exception):
    """One line for whoever started the benchmark: what is wrong and what to do."""
