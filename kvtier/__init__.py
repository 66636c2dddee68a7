"""Tiered KV-cache storage for LLM inference: GPU, pinned RAM, NVMe, shared stores."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
