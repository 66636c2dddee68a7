"""A policy that never returns, so that its cell of a sweep never ends."""

from __future__ import annotations

import sys
import threading

from kvtier.policies import ChunkCopy, PolicyContext
from kvtier.policies.eviction import Lru


class Stuck(Lru):
    """Reports that it runs if its tier has two slots, and waits for ever."""

    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        if self.capacity == 2:
            sys.stdout.write("running\n")
            sys.stdout.flush()
        threading.Event().wait()
