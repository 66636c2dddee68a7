"""Eviction policies; :mod:`kvtier.policies.registry` lists them by name."""

from __future__ import annotations

from kvtier.policies.eviction.lru import Lru

__all__ = ["Lru"]
