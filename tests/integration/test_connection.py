"""A connector that is taken out of an engine, and put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state

from tests.demo.connection import Connection


def scheduler(*, busy: bool = False) -> Any:
    return SimpleNamespace(connector="half", defer_block_free=True, has_requests=lambda: busy)


@pytest.fixture(autouse=True)
def worker_half(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", "worker half")
    return "worker half"


def state(of: Any) -> tuple[object, bool, bool]:
    """Return what the scheduler and the worker have of a connector."""
    return of.connector, of.defer_block_free, kv_transfer_state.has_kv_transfer_group()


def test_an_engine_is_without_a_connector_and_then_has_it_again() -> None:
    engine = scheduler()
    connection = Connection(engine)
    connection.use(detached=True)
    assert state(engine) == (None, False, False)
    connection.use(detached=False)
    assert state(engine) == ("half", True, True)
    assert kv_transfer_state.get_kv_transfer_group() == "worker half"


def test_a_connector_stays_as_it_is_while_there_are_requests() -> None:
    engine = scheduler(busy=True)
    connection = Connection(engine)
    connection.use(detached=False)
    with pytest.raises(RuntimeError, match="between requests only"):
        connection.use(detached=True)
    assert state(engine) == ("half", True, True)


def test_an_engine_without_a_connector_has_none_to_take_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", None)
    with pytest.raises(RuntimeError, match="no connector in this process"):
        Connection(scheduler()).use(detached=True)
