"""What a request may ask for, and what becomes of nonsense."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvtier.connector.hints import HintReader, RequestHints


def test_a_request_without_hints_asks_for_nothing() -> None:
    for params in (None, {}, {"other": 1}, {"kvtier": None}):
        assert HintReader().read(params) == RequestHints()


def test_hints_are_read() -> None:
    hints = HintReader().read({"kvtier": {"retain_s": 600, "skip_store": True}})
    assert hints == RequestHints(retain_s=600.0, skip_store=True)


@pytest.mark.parametrize(
    ("raw", "place"),
    [
        ({"retain_s": "10m"}, "retain_s"),
        ({"retain_s": -1}, "retain_s"),
        ({"retain_s": float("inf")}, "retain_s"),
        ({"pin": True}, "pin"),
        ([], "the whole"),
    ],
)
def test_nonsense_is_ignored_and_said_once(
    raw: Any, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader = HintReader()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert reader.read({"kvtier": raw}) == RequestHints()
    (record,) = caplog.records
    assert f"kv_transfer_params.kvtier is ignored: {place}: " in record.getMessage()
