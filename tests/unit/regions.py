"""Regions of RAM slots for one test."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from kvtier.memory import HostRegion, RegionGeometry

__all__ = ["open_regions"]

_NUMBERS = itertools.count()


@contextmanager
def open_regions() -> Iterator[Callable[[RegionGeometry], HostRegion]]:
    """Yield what opens regions that nobody attaches to; they are closed in the end."""
    with ExitStack() as stack:

        def open_region(geometry: RegionGeometry) -> HostRegion:
            name = f"test-{os.getpid()}-{next(_NUMBERS)}"
            region = HostRegion.create(name, geometry, attachers=0, timeout_s=1)
            stack.callback(region.close)
            return region

        yield open_region
