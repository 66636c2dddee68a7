"""What a pass measures."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Pass", "Passes", "anonymous_nbytes", "cpu_s"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Pass:
    """What one pass over the requests took.

    Attributes:
        nbytes: Bytes that went through the disk.
        seconds: Wall time, until the last byte and its books were done.
        cpu_s: Processor time of the process and of those it started.
        missed_chunks: Chunks of the requests that were not loaded, or not stored.
        delays_s: How late each 1 ms sleep of the loop ended.
    """

    nbytes: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    missed_chunks: int = 0
    delays_s: list[float] = field(default_factory=list)

    @property
    def mb_per_s(self) -> float:
        """Megabytes, 10^6 bytes, per second."""
        return self.nbytes / self.seconds / 1e6

    @property
    def cpu_s_per_gib(self) -> float:
        """Core-seconds per GiB moved."""
        return self.cpu_s / (self.nbytes / 2**30)


@dataclass(frozen=True, slots=True)
class Passes:
    """Both passes over one generation."""

    store: Pass
    promote: Pass

    @property
    def cpu_s_per_gib(self) -> float:
        """Core-seconds per GiB moved, both directions together."""
        moved = self.store.nbytes + self.promote.nbytes
        return (self.store.cpu_s + self.promote.cpu_s) / (moved / 2**30)

    @property
    def missed_chunks(self) -> int:
        """Chunks that were not stored or not loaded."""
        return self.store.missed_chunks + self.promote.missed_chunks

    @property
    def p99_delay_ms(self) -> float:
        """99th percentile of the loop's delay."""
        delays = sorted(self.store.delays_s + self.promote.delays_s)
        return delays[int(0.99 * (len(delays) - 1))] * 1e3


def cpu_s() -> float:
    """Return the processor time used so far by this process and all it ever started."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        total += used.ru_utime + used.ru_stime
    return total + sum(_living_cpu_s(pid) for pid in _descendants(os.getpid()))


def anonymous_nbytes() -> int:
    """Return the private memory of this process and of those it started."""
    own = os.getpid()
    return sum(_anonymous_nbytes(pid) for pid in (own, *_descendants(own)))


def _anonymous_nbytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text(encoding="ascii").split()):
            yield child
            yield from _descendants(child)


def _living_cpu_s(pid: int) -> float:
    """Return the time of a process; its own dead children count, too."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    fields = stat.rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS_PER_S
