"""How long the engine's steps take."""

from __future__ import annotations

from kvtier.connector.timing import StepClock
from kvtier.manager import prompt_tokens


class Played:
    """A clock that shows what it is set to, and counts how often it was read."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.readings = 0

    def __call__(self) -> float:
        self.readings += 1
        return self.now_s


class Steps:
    """A step clock on a played clock."""

    def __init__(self) -> None:
        self.clock = Played()
        self._steps = StepClock(self.clock)

    def scheduled(self, tokens: int, now_s: float) -> None:
        self.clock.now_s = now_s
        self._steps.scheduled(tokens)

    def ended(self, now_s: float) -> tuple[int, float] | None:
        self.clock.now_s = now_s
        return self._steps.ended()


def test_a_step_takes_from_being_scheduled_to_its_output() -> None:
    steps = Steps()
    steps.scheduled(512, 10.0)
    assert steps.ended(10.25) == (512, 0.25)
    steps.scheduled(16, 20.0)
    assert steps.ended(20.5) == (16, 0.5)


def test_a_step_scheduled_ahead_begins_when_the_one_before_it_is_over() -> None:
    steps = Steps()
    steps.scheduled(100, 0.0)
    steps.scheduled(200, 0.1)
    assert steps.ended(1.0) == (100, 1.0)
    steps.scheduled(300, 1.1)
    assert steps.ended(3.0) == (200, 2.0)
    assert steps.ended(3.5) == (300, 0.5)


def test_a_step_that_only_generates_delays_one_that_was_scheduled_ahead_of_its_end() -> None:
    steps = Steps()
    steps.scheduled(0, 0.0)
    steps.scheduled(200, 0.1)
    assert steps.ended(1.0) is None
    assert steps.ended(3.0) == (200, 2.0)


def test_steps_that_only_generate_read_no_clock() -> None:
    steps = Steps()
    for second in range(10):
        steps.scheduled(0, float(second))
        assert steps.ended(second + 0.5) is None
    assert not steps.clock.readings
    steps.scheduled(300, 10.0)
    assert steps.ended(10.5) == (300, 0.5)


def test_an_output_without_a_scheduled_request_is_no_step() -> None:
    assert Steps().ended(1.0) is None


def test_steps_that_never_end_are_forgotten() -> None:
    steps = Steps()
    for number in range(100):
        steps.scheduled(number, float(number))
    assert steps.ended(200.0) == (92, 108.0)


def test_requests_that_generate_are_not_counted_as_prompts() -> None:
    assert prompt_tokens([1] * 300 + [5] * 20) == 0
    assert prompt_tokens([1, 2048, 17]) == 2065
