"""The RAM tier's shared memory, and copies between it and the device."""

from __future__ import annotations

from kvtier.memory.control import ControlBlock
from kvtier.memory.host_region import HostRegion
from kvtier.memory.slot_layout import RegionGeometry

__all__ = ["ControlBlock", "HostRegion", "RegionGeometry"]
