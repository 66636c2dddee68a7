"""The demo's step timer: what it counts as a step, and of which kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvtier.vllm.demo.timing import StepTimer


class Scheduler:
    """Schedules what it is told to."""

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


def test_steps_are_told_apart_and_what_computes_nothing_is_none() -> None:
    core = Core({"a": 200, "b": 1}, {"a": 1, "b": 1}, {"a": 1}, {}, rests_first=True)
    timer = StepTimer(core)
    passed_on = [core.step_fn() for _ in range(5)]
    assert [executed for _, executed in passed_on] == [False, True, True, True, False]
    timer.answered()
    times = timer.take()
    assert (len(times.prefill_s), len(times.decode_s)) == (1, 2)
    assert min(times.prefill_s + times.decode_s) > 0
    assert times.engine_cpu_s >= 0
    assert times.hosts_cpu_s >= 0


def test_each_wave_begins_anew() -> None:
    core = Core({"a": 200}, {"a": 1})
    timer = StepTimer(core)
    core.step_fn()
    timer.begin()
    core.step_fn()
    times = timer.take()
    assert (len(times.prefill_s), len(times.decode_s)) == (0, 1)
