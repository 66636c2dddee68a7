"""A reset is carried out, owed or said to be lost, whatever the process does."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from kvtier.config import NvmeTierConfig, TierConfig
from kvtier.errors import ClosedError, TierUnavailableError
from kvtier.testing.tier_harness import TierHarness, make_keys
from kvtier.tiers.base import TierContext
from kvtier.tiers.hosted import HostedTier, client, connection, process
from tests.unit.hosted_tier.hosting import CORRUPT, DONE, FAILED, kill

pytestmark = pytest.mark.usefixtures("forked_hosts")


async def test_a_reset_reaches_a_store_whose_host_has_died(
    harness: TierHarness[HostedTier],
) -> None:
    keys = make_keys([1])
    await harness.put(keys, [0])
    kill(harness.tier, signal.SIGKILL)
    await harness.tier.reset()
    assert await harness.reopen() == []


def refuse_to_start(options: TierConfig, context: TierContext) -> None:
    raise TierUnavailableError(options.name, "no more processes")


@pytest.mark.parametrize("used_before_closing", [True, False])
async def test_a_reset_without_a_host_is_done_later(
    harness: TierHarness[HostedTier], monkeypatch: pytest.MonkeyPatch, used_before_closing: bool
) -> None:
    keys = make_keys(range(3))
    await harness.put(keys[:2], [0, 1])
    kill(harness.tier, signal.SIGKILL)
    with monkeypatch.context() as patch:
        patch.setattr(process.HostProcess, "start", refuse_to_start)
        with pytest.raises(TierUnavailableError, match="no more processes"):
            await harness.tier.reset()
        assert await harness.get(keys[:1], [0]) == [FAILED]
    if used_before_closing:
        assert await harness.get(keys[:1], [0]) == [CORRUPT]
        assert await harness.put(keys[2:], [1]) == [DONE]
        assert await harness.get(keys[2:], [1]) == [DONE]
    assert await harness.reopen() == [], (
        "a restart brings back neither what was before nor after"
    )


@pytest.mark.parametrize("index_is_lost", [False, True])
async def test_chunks_stored_after_a_reset_outlive_the_host_but_not_the_engine(
    harness: TierHarness[HostedTier], options: NvmeTierConfig, index_is_lost: bool
) -> None:
    keys = make_keys(range(3))
    await harness.tier.reset()
    assert await harness.put(keys[:1], [0]) == [DONE]
    if index_is_lost:
        [index] = options.path.glob("*/index.sqlite")
        index.rename(index.with_suffix(".lost"))
    kill(harness.tier, signal.SIGKILL)
    assert await harness.get(keys[:1], [0]) == [FAILED]
    assert await harness.get(keys[:1], [0]) == [CORRUPT if index_is_lost else DONE]
    assert await harness.put(keys[1:2], [1]) == [DONE]
    assert await harness.reopen() == []
    assert await harness.put(keys[2:], [2]) == [DONE]
    assert await harness.reopen() == [(keys[2], 2)]


async def test_a_reset_that_closing_cannot_make_up_for_either_is_said_to_be_lost(
    harness: TierHarness[HostedTier],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await harness.put(make_keys([1]), [0])
    kill(harness.tier, signal.SIGKILL)
    monkeypatch.setattr(process.HostProcess, "start", refuse_to_start)
    with pytest.raises(TierUnavailableError):
        await harness.tier.reset()
    await harness.tier.aclose()
    assert "no more processes; the reset was not carried out" in caplog.text


async def test_nothing_is_read_or_written_between_a_reset_that_failed_and_one_that_did_not(
    harness: TierHarness[HostedTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys([1])
    await harness.put(keys, [0])
    called: list[str] = []
    failures = iter([True, True, True])
    call = connection.Connection.call

    def fail_at_first(self: connection.Connection, op: str, *make: Any) -> Any:
        called.append(op)
        if op == "reset" and next(failures, False):
            raise TierUnavailableError("nvme", "the index was neither cleared nor moved away")
        return call(self, op, *make)

    monkeypatch.setattr(connection.Connection, "call", fail_at_first)
    with pytest.raises(TierUnavailableError):
        await harness.tier.reset()
    assert await harness.get(keys, [0]) == [FAILED]
    assert await harness.get(keys, [0]) == [CORRUPT]
    assert called == ["reset", "reset", "reset", "reset", "read"]


async def test_a_reset_that_a_hung_host_keeps_from_ending_starts_none_for_a_closed_tier(
    harness: TierHarness[HostedTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(process, "_EXIT_TIMEOUT_S", 0.05)
    await harness.tier.aopen()
    first = harness.tier.host_pid
    kill(harness.tier, signal.SIGSTOP)
    resetting = asyncio.ensure_future(harness.tier.reset())
    await asyncio.sleep(0)
    await harness.tier.aclose()
    with pytest.raises(ClosedError):
        await resetting
    assert harness.tier.host_pid == first
