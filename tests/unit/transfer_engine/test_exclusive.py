"""What is done to a tier while none of its jobs run."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvtier.errors import ClosedError, TierUnavailableError
from kvtier.types import Outcome, Purpose
from tests.unit.transfer_engine.scripted import (
    DOWN,
    UP,
    MakeEngine,
    Scripted,
    cancelled,
    engine_of,
    job,
    wait_for,
)


def test_an_exclusive_action_waits_for_what_runs_cancels_what_waits_and_delays_the_rest(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine()
    running, waiting, later = job(), job(), job()
    gate = route.hold(running)
    engine.submit(running)
    assert route.entered[running.job_id].wait(10)
    engine.submit(waiting)
    seen: list[list[int]] = []

    async def act() -> None:
        seen.append(list(route.began))

    assert not engine.exclusively_each({"ram": act}, timeout_s=0.01)
    engine.submit(later)
    assert not engine.wait([later.job_id], timeout_s=0.01)
    assert engine.wait([waiting.job_id], timeout_s=10)
    gate.set()
    wait_for(engine, running, waiting, later)
    assert sorted(route.abandoned) == [running.job_id, waiting.job_id]
    assert seen == [[running.job_id]]
    assert route.began == [running.job_id, later.job_id]


def test_an_exclusive_action_waits_for_all_that_run_and_not_for_the_first(
    route: Scripted,
) -> None:
    engine = engine_of(route, UP, ("tape", "ram"), limits={"running_bytes": 1 << 20})
    first, last, beside = job(), job(), job()._replace(source="tape")
    gates = [route.hold(each) for each in (first, last)]
    engine.submit(first, last)
    assert all(route.entered[each.job_id].wait(10) for each in (first, last))
    ended: list[bool] = []
    acted = threading.Event()

    async def act() -> None:
        ended.append(gates[1].is_set())
        acted.set()

    assert not engine.exclusively_each({"nvme": act}, timeout_s=0.01)
    gates[0].set()
    wait_for(engine, first)
    engine.submit(beside)
    wait_for(engine, beside)  # so the engine's thread had its turns since
    gates[1].set()
    assert acted.wait(10)
    assert ended == [True]
    assert engine.close(timeout_s=10)


def test_an_exclusive_action_on_a_hanging_tier_delays_no_other_tier(
    route: Scripted,
) -> None:
    engine = engine_of(route, UP, DOWN, ("tape", "ram"))
    hung, waiting = job(), job()
    gate = route.hold(hung)
    engine.submit(hung)
    assert route.entered[hung.job_id].wait(10)
    engine.submit(waiting)
    reset: list[str] = []
    release, tape_is_reset = threading.Event(), threading.Event()

    async def reset_nvme() -> None:
        await asyncio.get_running_loop().run_in_executor(None, release.wait)
        reset.append("nvme")

    async def reset_tape() -> None:
        reset.append("tape")
        tape_is_reset.set()

    def check_that_only_nvme_waits() -> None:
        behind, beside = job(Purpose.DEMOTE), job()._replace(source="tape")
        engine.submit(behind, beside)
        assert wait_for(engine, beside)[beside.job_id] == ([Outcome.DONE], True)
        assert reset == ["tape"]
        assert behind.job_id not in route.began

    actions = {"nvme": reset_nvme, "tape": reset_tape}
    assert not engine.exclusively_each(actions, timeout_s=0.01)
    assert tape_is_reset.wait(10)
    check_that_only_nvme_waits()  # for a job that hangs
    gate.set()
    wait_for(engine, hung)
    check_that_only_nvme_waits()  # for a reset that hangs
    release.set()
    assert engine.close(timeout_s=10)
    assert reset == ["tape", "nvme"]


def test_the_failure_of_one_tier_is_raised_after_all_tiers_ended(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    reset: list[str] = []

    async def reset_ram() -> None:
        reset.append("ram")

    with pytest.raises(ExceptionGroup) as raised:
        engine.exclusively_each({"nvme": cancelled, "ram": reset_ram}, timeout_s=10)
    assert [type(error) for error in raised.value.exceptions] == [TierUnavailableError]
    assert reset == ["ram"]


def test_jobs_that_expire_behind_a_reset_that_hangs_count_against_the_tier(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(breaker_failures=2, breaker_backoff_s=0.0)
    release = threading.Event()

    async def hang() -> None:
        await asyncio.get_running_loop().run_in_executor(None, release.wait)

    assert not engine.exclusively_each({"nvme": hang}, timeout_s=0.01)
    late, refused = [job(timeout_s=0.01), job(timeout_s=0.01)], [job(), job()]
    engine.submit(refused[0], *late)
    seen = wait_for(engine, *late, refused[0])
    assert [seen[each.job_id] for each in late] == [([Outcome.EXPIRED], True)] * 2
    assert seen[refused[0].job_id] == ([Outcome.REFUSED], True), "it waits for nothing"
    assert ("nvme", "ram") in engine.out_of_service(), "though its back-off time has passed"
    engine.submit(refused[1])
    assert wait_for(engine, refused[1]) == {refused[1].job_id: ([Outcome.REFUSED], True)}
    release.set()
    answer = [Outcome.REFUSED]
    for _ in range(10_000):  # until the reset is over, and it is the probe
        probe = job()
        engine.submit(probe)
        answer, _ = wait_for(engine, probe)[probe.job_id]
        if answer != [Outcome.REFUSED]:
            break
    assert answer == [Outcome.DONE]
    assert not engine.out_of_service()


def test_overlapping_exclusive_actions_each_keep_others_out(
    make_engine: MakeEngine, route: Scripted
) -> None:
    engine = make_engine()
    running, later = job(), job()
    gate = route.hold(running)
    engine.submit(running)
    assert route.entered[running.job_id].wait(10)
    seen: list[str] = []
    release = threading.Event()

    async def first() -> None:
        seen.append("first")

    async def second() -> None:
        await asyncio.get_running_loop().run_in_executor(None, release.wait)
        seen.append("second")

    for act in (second, first):
        assert not engine.exclusively_each({"ram": act}, timeout_s=0.01)
    engine.submit(later)
    gate.set()
    wait_for(engine, running)
    assert not engine.wait([later.job_id], timeout_s=0.05)
    release.set()
    wait_for(engine, later)
    assert seen == ["first", "second"]
    assert engine.idle


def test_nothing_is_done_to_the_tiers_of_an_engine_that_was_closed(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    assert engine.close(timeout_s=10)
    acted: list[str] = []

    async def act() -> None:
        acted.append("ram")

    with pytest.raises(ClosedError):
        engine.exclusively_each({"ram": act}, timeout_s=10)
    assert not acted
