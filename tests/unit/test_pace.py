"""How long the engine's steps take."""

from __future__ import annotations

from kvtier.connector.pace import StepClock
from kvtier.manager.estimates import prompt_tokens


def test_a_step_takes_from_being_scheduled_to_its_output() -> None:
    clock = StepClock()
    clock.scheduled(512, 10.0)
    assert clock.ended(10.25) == (512, 0.25)
    clock.scheduled(16, 20.0)
    assert clock.ended(20.5) == (16, 0.5)


def test_a_step_scheduled_ahead_begins_when_the_one_before_it_is_over() -> None:
    clock = StepClock()
    clock.scheduled(100, 0.0)
    clock.scheduled(200, 0.1)
    assert clock.ended(1.0) == (100, 1.0)
    clock.scheduled(300, 1.1)
    assert clock.ended(3.0) == (200, 2.0)
    assert clock.ended(3.5) == (300, 0.5)


def test_an_output_nobody_scheduled_is_no_step() -> None:
    assert StepClock().ended(1.0) is None


def test_steps_that_never_end_are_forgotten() -> None:
    clock = StepClock()
    for number in range(100):
        clock.scheduled(number, float(number))
    assert clock.ended(200.0) == (92, 108.0)


def test_requests_that_generate_are_not_counted_as_prompts() -> None:
    assert prompt_tokens([1] * 300 + [5] * 20) == 0
    assert prompt_tokens([1, 2048, 17]) == 2065
