"""A disk that does not answer: deadlines, the breaker, and what is true when it is back.

Opening a store that hangs is in ``test_slab_faults_stall_open.py``, and what the manager makes
of it all in ``test_slab_faults_stall_manager.py``.
"""

from __future__ import annotations

import contextlib
import errno
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.types import Job, Purpose
from tests.unit.stall_rig import (
    DONE,
    EXPIRED,
    FAILED,
    HANG_S,
    REFUSED,
    RUNNING,
    SLOT,
    SOON_S,
    Rig,
    keys_in,
)

STORING = {call: options for call, options in RUNNING.items() if call != "preadv"}
CLOSING = ("sql PRAGMA", "sql close", "close")
CLEARING = ("sql PRAGMA", "sql DELETE")
MOVING_AWAY = ("sql ROLLBACK", "unlink", "rename", "open", "sync", "close")
NOTING = ("sql UPDATE",)

OpenRig = Callable[..., Rig]


@pytest.fixture
def open_rig(tmp_path: Path) -> Iterator[OpenRig]:
    with contextlib.ExitStack() as stack:
        yield lambda **options: Rig(tmp_path, stack, **options)


@pytest.fixture
def rig(open_rig: OpenRig) -> Rig:
    return open_rig()


def hang(rig: Rig, call: str) -> tuple[threading.Event, Job]:
    """Let a job hang in ``call``: a promotion from slot 0, or a store over what is there."""
    gate = rig.stall(call)
    deadline_s = time.monotonic() + HANG_S
    while time.monotonic() < deadline_s:
        if call == "preadv":
            stuck = rig.promote(0, timeout_s=SOON_S)
        else:
            stuck = rig.store(0, version=1, timeout_s=SOON_S)
        number, outcomes, is_settled = rig.next_result()
        assert (number, outcomes) == (stuck.job_id, [EXPIRED])
        if not is_settled:  # else the machine was too busy to begin with it in time
            assert rig.io.wait_until_stalled(timeout_s=HANG_S)
            return gate, stuck
    raise TimeoutError(f"no job ever reached {call}")


def test_a_disk_that_hangs_is_left_alone_and_used_again_when_it_answers(rig: Rig) -> None:
    first = rig.store(0, 1, 2)
    assert rig.settled(first) == {first.job_id: [DONE] * 3}
    gate, stuck = hang(rig, "preadv")
    behind = rig.promote(1, timeout_s=SOON_S)
    assert rig.next_result() == (behind.job_id, [EXPIRED], True)
    assert rig.out_of_service()
    refused = rig.promote(2)
    assert rig.settled(refused) == {refused.job_id: [REFUSED]}, "at once, not at its deadline"
    assert not rig.engine.wait([stuck.job_id], timeout_s=SOON_S), "a thread is still in it"
    assert rig.ram.slot(0) == bytes(SLOT)
    stored = rig.store(5)
    assert rig.settled(stored) == {stored.job_id: [DONE]}, "the other direction is well"
    gate.set()
    assert rig.settled(stuck) == {stuck.job_id: [DONE]}
    assert rig.holds(0), "the slots were the job's until the call returned"
    assert rig.back_in_service(1)
    assert not rig.out_of_service()


@pytest.mark.parametrize("call", STORING)
def test_a_store_that_hangs_anywhere_is_answered_late_and_is_whole(
    open_rig: OpenRig, call: str
) -> None:
    rig = open_rig(**STORING[call])
    first = rig.store(0, 1, 2)
    assert rig.settled(first) == {first.job_id: [DONE] * 3}
    gate, stuck = hang(rig, call)
    behind = rig.store(3, timeout_s=SOON_S)
    assert rig.next_result() == (behind.job_id, [EXPIRED], True)
    assert rig.out_of_service(Purpose.STORE)
    refused = rig.store(4)
    assert rig.settled(refused) == {refused.job_id: [REFUSED]}, "at once, not at its deadline"
    assert not rig.engine.wait([stuck.job_id], timeout_s=SOON_S), "a thread is still in it"
    loaded = rig.promote(1)
    assert rig.settled(loaded) == {loaded.job_id: [DONE]}, "the other direction is well"
    assert rig.holds(1)
    gate.set()
    assert rig.settled(stuck) == {stuck.job_id: [DONE]}
    assert rig.engine.idle
    assert {each.queued_bytes for each in rig.engine.statistics().values()} == {0}
    again = rig.promote(0, version=1)
    assert rig.settled(again) == {again.job_id: [DONE]}
    assert rig.holds(0, version=1)
    assert rig.back_in_service(3, Purpose.STORE)


def test_loads_go_on_while_the_index_hangs_in_noting_the_last_ones(rig: Rig) -> None:
    rig.settled(rig.store(0, 1))
    gate = rig.stall("sql UPDATE")
    for slot in (0, 1, 0):
        loaded = rig.promote(slot)
        assert rig.settled(loaded) == {loaded.job_id: [DONE]}
        assert rig.holds(slot)
    assert rig.io.wait_until_stalled(timeout_s=HANG_S)
    stuck = rig.store(2, timeout_s=SOON_S)
    assert rig.next_result() == (stuck.job_id, [EXPIRED], False), "its row waits behind that"
    gate.set()
    assert rig.settled(stuck) == {stuck.job_id: [DONE]}


def test_a_probe_that_hangs_as_well_opens_the_breaker_again(rig: Rig) -> None:
    first = rig.store(0, 1)
    rig.settled(first)
    rig.io.fail("preadv", errno.EIO)
    for _ in range(2):
        failed = rig.promote(0)
        assert rig.settled(failed) == {failed.job_id: [FAILED]}
    rig.io.heal()
    gate = rig.stall()
    assert rig.out_of_service()
    rig.end_backoff()
    probe = rig.promote(0)
    rig.expire()
    assert rig.next_result() == (probe.job_id, [EXPIRED], False)
    assert rig.out_of_service()
    gate.set()
    assert rig.back_in_service(1)


@pytest.mark.parametrize("call", RUNNING)
def test_closing_while_a_job_hangs_gives_up_in_time_and_loses_nothing(
    open_rig: OpenRig, call: str
) -> None:
    rig = open_rig(**RUNNING[call])
    rig.settled(rig.store(0, 1))
    gate, stuck = hang(rig, call)
    began_s = time.monotonic()
    assert not rig.engine.close(timeout_s=SOON_S)
    assert time.monotonic() - began_s < HANG_S
    gate.set()
    assert rig.settled(stuck) == {stuck.job_id: [DONE]}
    version = int(call != "preadv")
    assert rig.holds(0, version)
    assert rig.found_again() == {*keys_in([0], version), *keys_in([1])}


@pytest.mark.parametrize("call", CLOSING)
def test_a_tier_that_hangs_while_it_is_closed_is_given_up_in_time_and_loses_nothing(
    open_rig: OpenRig, call: str
) -> None:
    rig = open_rig()
    rig.settled(rig.store(0, 1))
    gate = rig.stall(call)
    began_s = time.monotonic()
    assert not rig.engine.close(timeout_s=SOON_S)
    assert time.monotonic() - began_s < HANG_S
    assert rig.io.wait_until_stalled(timeout_s=HANG_S)
    gate.set()
    assert rig.found_again() == set(keys_in([0, 1]))


@pytest.mark.parametrize("call", [*CLEARING, *MOVING_AWAY])
def test_a_reset_that_hangs_is_given_up_in_time_and_over_when_the_disk_answers(
    rig: Rig, call: str
) -> None:
    rig.settled(rig.store(0, 1))
    if call in MOVING_AWAY:  # an index that cannot be cleared is moved away
        rig.io.fail("sql DELETE", sqlite3.SQLITE_IOERR)
    gate = rig.stall(call)
    over = threading.Event()

    async def reset() -> None:
        await rig.tier.reset()
        over.set()

    assert not rig.engine.exclusively_each({"nvme": reset}, timeout_s=SOON_S)
    assert rig.io.wait_until_stalled(timeout_s=HANG_S)
    waits = rig.promote(0, timeout_s=SOON_S)
    assert rig.next_result() == (waits.job_id, [EXPIRED], True), "nothing runs meanwhile"
    assert not over.is_set()
    gate.set()
    assert over.wait(HANG_S)
    rig.io.heal()
    assert rig.engine.close(timeout_s=HANG_S)
    assert rig.found_again() == set()


@pytest.mark.parametrize("options", [{}, {"durability": "power"}])
def test_all_that_an_open_slab_calls_is_a_point_where_a_test_lets_it_hang(
    open_rig: OpenRig, options: dict[str, str]
) -> None:
    rig = open_rig(**options)
    opened = len(rig.io.calls)
    rig.settled(rig.store(0, 1))
    rig.settled(rig.store(0, version=1))
    rig.settled(rig.promote(1))
    rig.settled(rig.store(2))
    assert rig.engine.exclusively_each({"nvme": rig.tier.reset}, timeout_s=HANG_S)
    rig.settled(rig.store(3))
    rig.io.fail("sql DELETE", sqlite3.SQLITE_IOERR)
    assert rig.engine.exclusively_each({"nvme": rig.tier.reset}, timeout_s=HANG_S)
    rig.io.heal()
    assert rig.engine.close(timeout_s=HANG_S)
    called = set(rig.io.calls[opened:])
    assert called <= {*RUNNING, *NOTING, *CLEARING, *MOVING_AWAY, *CLOSING}
    assert called >= {"preadv", "pwritev", "sql COMMIT", "rename", "sql close"}
