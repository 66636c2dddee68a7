"""Time the steps of an engine from inside its process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

from kvtier.manager import prompt_tokens
from tests.demo.scenario import StepTimes

__all__ = ["StepTimer"]

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM = 11, 12
"""Places in ``/proc/PID/stat``, counted from the state."""


class StepTimer:
    """Times the steps of an engine core in this process.

    A step is what the core does between two rounds of its loop: schedule, compute, update. What
    a front end does with the output is not in it, and a step that computes nothing is not
    counted.

    Args:
        core: vLLM's engine core; its ``step_fn`` and its scheduler's ``schedule`` are wrapped.
    """

    def __init__(self, core: Any) -> None:
        self._step = core.step_fn
        self._schedule = core.scheduler.schedule
        core.step_fn = self._timed
        core.scheduler.schedule = self._noted
        self._scheduled: list[int] = []
        self.begin()

    def begin(self) -> None:
        """Forget what was timed; a wave begins."""
        self._prefill_s: list[float] = []
        self._decode_s: list[float] = []
        self._cpu_s = time.process_time()
        self._hosts_cpu_s = children_cpu_s()
        self._engine_cpu_s = 0.0

    def answered(self) -> None:
        """Note that the wave's last request was answered."""
        self._engine_cpu_s = time.process_time() - self._cpu_s

    def take(self) -> StepTimes:
        """Return what was timed since :meth:`begin`."""
        return StepTimes(
            prefill_s=tuple(self._prefill_s),
            decode_s=tuple(self._decode_s),
            engine_cpu_s=self._engine_cpu_s,
            hosts_cpu_s=children_cpu_s() - self._hosts_cpu_s,
        )

    def _noted(self, *arguments: Any, **named: Any) -> Any:
        output = self._schedule(*arguments, **named)
        self._scheduled = list(output.num_scheduled_tokens.values())
        return output

    def _timed(self) -> Any:
        self._scheduled = []
        began_s = time.perf_counter()
        outputs = self._step()
        seconds = time.perf_counter() - began_s
        if self._scheduled:
            prefills = prompt_tokens(self._scheduled)
            (self._prefill_s if prefills else self._decode_s).append(seconds)
        return outputs


def children_cpu_s() -> float:
    """Return the processor time of this process's children that run."""
    me = Path("/proc/self")
    ticks = 0
    for children in me.glob("task/*/children"):
        for pid in children.read_text().split():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[_USER]) + int(fields[_SYSTEM])
    return ticks / _TICKS_PER_S
