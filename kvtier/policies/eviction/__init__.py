"""Eviction policies, one module each."""

from __future__ import annotations

from kvtier.policies.eviction.lru import Lru

__all__ = ["Lru"]
