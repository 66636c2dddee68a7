"""A cell of a sweep that never ends."""

from __future__ import annotations

import sys
import threading


class Stuck:
    """Stands for what a process of a sweep runs cells with."""

    def run(self, _: object) -> None:
        sys.stdout.write("running\n")
        sys.stdout.flush()
        threading.Event().wait()
