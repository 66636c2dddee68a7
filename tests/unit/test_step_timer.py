"""The demo's step timer: what it counts as a step, and of which kind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tests.demo import timing
from tests.demo.timing import StepTimer

WORK_S = 0.1
TICK_S = 2 / os.sysconf("SC_CLK_TCK")  # user and system time are rounded down
WORK = f"""
import time
while time.process_time() < {WORK_S}:
    pass
print("done", flush=True)
input()
"""


@dataclass
class Clocks:
    """The processor time that the timer sees."""

    engine_s: float = 7.0
    children_s: float = 3.0


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(time, "process_time", lambda: clocks.engine_s)
    monkeypatch.setattr(timing, "children_cpu_s", lambda: clocks.children_s)
    return clocks


class Scheduler:
    """Schedules the given steps."""

    def __init__(self, *steps: dict[str, int]) -> None:
        self._steps = list(steps)

    def schedule(self) -> Any:
        return SimpleNamespace(num_scheduled_tokens=self._steps.pop(0))


class Core:
    """The part of vLLM's engine core that is timed."""

    def __init__(self, *steps: dict[str, int], rests_first: bool = False) -> None:
        self.scheduler = Scheduler(*steps)
        self._rests = rests_first
        self.step_fn = self.step

    def step(self) -> tuple[object, bool]:
        if self._rests:
            self._rests = False
            return {}, False
        output = self.scheduler.schedule()
        return output, bool(output.num_scheduled_tokens)


def test_prefill_and_decode_steps_are_timed_and_empty_steps_are_not() -> None:
    core = Core({"a": 200, "b": 1}, {"a": 1, "b": 1}, {"a": 1}, {}, rests_first=True)
    timer = StepTimer(core)
    passed_on = [core.step_fn() for _ in range(5)]
    assert [executed for _, executed in passed_on] == [False, True, True, True, False]
    timer.answered()
    times = timer.take()
    assert (len(times.prefill_s), len(times.decode_s)) == (1, 2)
    assert min(times.prefill_s + times.decode_s) > 0


def test_processor_time_is_the_engines_until_the_last_answer_and_its_childrens_until_the_end(
    clocks: Clocks,
) -> None:
    timer = StepTimer(Core())
    timer.begin()
    clocks.engine_s += 2.0
    clocks.children_s += 0.25
    timer.answered()
    clocks.engine_s += 4.0
    clocks.children_s += 0.5
    times = timer.take()
    assert (times.engine_cpu_s, times.hosts_cpu_s) == (2.0, 0.75)


def test_the_processor_time_of_a_child_that_runs_is_counted() -> None:
    before_s = timing.children_cpu_s()
    working = [sys.executable, "-S", "-c", WORK]
    with subprocess.Popen(working, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"done\n"
        assert timing.children_cpu_s() - before_s >= WORK_S - TICK_S


def test_each_wave_begins_anew() -> None:
    core = Core({"a": 200}, {"a": 1})
    timer = StepTimer(core)
    core.step_fn()
    timer.begin()
    core.step_fn()
    times = timer.take()
    assert (len(times.prefill_s), len(times.decode_s)) == (0, 1)
