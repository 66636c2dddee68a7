"""What a request may ask for, and what becomes of nonsense."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvtier.connector.hints import NO_HINTS, HintReader, RequestHints, TierNature
from kvtier.policies import RequestTerms
from kvtier.testing.probes import count_entries

NATURES = [
    TierNature("ram", "CPU", "LOCAL"),
    TierNature("nvme", "STORAGE", "LOCAL"),
    TierNature("remote", "STORAGE", "REMOTE"),
]


def read(kvtier: Any = None, **params: Any) -> RequestHints:
    given = params if kvtier is None else {"kvtier": kvtier, **params}
    return HintReader(NATURES).read(given)


def test_a_request_without_hints_asks_for_nothing() -> None:
    given: list[dict[str, Any]] = [{}, {"other": 1}, {"kvtier": None}, {"kvtier": {}}]
    for params in (None, *given):
        assert HintReader(NATURES).read(params) == NO_HINTS


def test_retention_skip_store_and_session_are_read_from_the_hints() -> None:
    hints = read({"retain_s": 600, "skip_store": True, "session": "chat 7"})
    assert hints.retain_s == 600.0
    assert hints.terms.stores_nothing
    assert hints.terms == RequestTerms(store_tiers=frozenset(), session="chat 7")


@pytest.mark.parametrize(
    ("fields", "load", "store"),
    [
        ({"skip_load": True}, set(), None),
        ({"skip_load": True, "load_tiers": ["ram"]}, set(), None),
        ({"load_tiers": []}, set(), None),
        ({"load_tiers": ["ram"]}, {0}, None),
        ({"load_tiers": ["nvme", "ram", "ram"]}, {0, 1}, None),
        ({"store_tiers": ["ram", "remote"]}, None, {0, 2}),
        ({"store_tiers": ["ram"], "skip_store": True}, None, set()),
        ({"skip_load": False, "skip_store": False}, None, None),
    ],
)
def test_tiers_are_named_as_in_the_configuration(
    fields: dict[str, Any], load: set[int] | None, store: set[int] | None
) -> None:
    terms = read(fields).terms
    assert terms.load_tiers == load
    assert terms.store_tiers == store


@pytest.mark.parametrize(
    ("matchers", "tiers"),
    [
        ([], set()),
        ([{}], {0, 1, 2}),
        ([{"medium": "CPU"}], {0}),
        ([{"medium": "storage"}], {1, 2}),
        ([{"locality": "local"}], {0, 1}),
        ([{"medium": "STORAGE", "locality": "REMOTE"}], {2}),
        ([{"medium": "CPU"}, {"locality": "REMOTE"}], {0, 2}),
        ([{"medium": "CPU", "locality": "REMOTE"}], set()),
        ([{"medium": "CPU"}, {"medium": "TAPE"}], {0}),
    ],
)
def test_tiers_are_matched_by_their_nature(
    matchers: list[dict[str, str]], tiers: set[int]
) -> None:
    assert read(kv_load_tiers=matchers).terms.load_tiers == frozenset(tiers)


def test_both_ways_of_naming_tiers_must_agree() -> None:
    terms = read({"load_tiers": ["ram", "nvme"]}, kv_load_tiers=[{"medium": "STORAGE"}]).terms
    assert terms.load_tiers == frozenset({1})


@pytest.mark.parametrize(
    "raw", ["CPU", {"medium": "CPU"}, [{"medium": "TAPE"}], ["CPU"], [{"locality": 3}]]
)
def test_matchers_that_cannot_be_read_allow_every_tier(
    raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(kv_load_tiers=raw) == NO_HINTS
    (record,) = caplog.records
    assert "kv_transfer_params.kv_load_tiers = " in record.getMessage()


@pytest.mark.parametrize(
    ("raw", "place", "remedy"),
    [
        ({"retain_s": "10m"}, "kvtier.retain_s = '10m'", "write seconds"),
        ({"retain_s": -1}, "kvtier.retain_s = -1", "at most 604800"),
        ({"retain_s": float("inf")}, "kvtier.retain_s = inf", "write seconds"),
        ({"retain_s": float("nan")}, "kvtier.retain_s = nan", "write seconds"),
        ({"skip_load": "yes"}, "kvtier.skip_load = 'yes'", "write true or false"),
        ({"load_tiers": "ram"}, "kvtier.load_tiers = 'ram'", "of ram, nvme, remote"),
        ({"load_tiers": [1]}, "kvtier.load_tiers = ", "of ram, nvme, remote"),
        ({"load_tiers": ["nmve"]}, "kvtier.load_tiers = ('nmve',)", "of ram, nvme, remote"),
        ({"store_tiers": ["ram", "x"]}, "kvtier.store_tiers = ", "of ram, nvme, remote"),
        ({"session": 7}, "kvtier.session = 7", "a text of at most 256"),
        ({"session": "x" * 257}, "kvtier.session = 'xxx", "a text of at most 256"),
        ({"pin": True}, "kvtier.* = {'pin': True}", "write one of retain_s, skip_store"),
        ([], "kvtier = []", 'write {"retain_s": 600}'),
    ],
)
def test_invalid_hints_are_ignored_and_logged_once_with_a_remedy(
    raw: Any, place: str, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader = HintReader(NATURES)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert reader.read({"kvtier": raw}) == NO_HINTS
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(f"a request's kv_transfer_params.{place}")
    assert remedy in message


def test_a_bad_field_does_not_take_the_good_ones_with_it() -> None:
    hints = read(
        {"retain_s": "long", "skip_load": True, "load_tiers": ["tape"], "session": "a"}
    )
    assert hints == RequestHints(None, RequestTerms(load_tiers=frozenset(), session="a"))


def test_a_name_that_is_no_text_does_not_take_the_good_ones_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert read({"\ud800": 1, "skip_store": True}).terms.stores_nothing
    (record,) = caplog.records
    assert "no such field" in record.getMessage()


def test_each_field_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = HintReader(NATURES)
    for _ in range(2):
        reader.read({"kvtier": {"retain_s": -1, "session": 0}})
    assert len(caplog.records) == 2


def test_clients_cannot_fill_the_log_with_names_of_their_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = HintReader(NATURES)
    held: list[int] = []
    for number in range(10):
        reader.read({"kvtier": {f"x{number}\n{'y' * 1000}": "z\n" * 1000}})
        held.append(count_entries(reader))
    (record,) = caplog.records
    assert len(record.getMessage()) < 500
    assert "\n" not in record.getMessage()
    assert held == held[:1] * 10, "it keeps their names"


@pytest.mark.parametrize("field", ["load_tiers", "no_such_field"])
def test_a_value_nested_too_deep_does_not_spoil_the_other_fields(
    field: str,
) -> None:
    nested: list[Any] = []
    for _ in range(10_000):
        nested = [nested]
    assert read({"skip_store": True, field: nested}).terms.stores_nothing


def test_keys_that_are_no_text_are_ignored_too() -> None:
    assert read({1: 2, None: 3, "session": "a"}).terms.session == "a"


@pytest.mark.parametrize(
    "raw",
    [
        {"load_tiers": ["ram"] * 200_000},
        {"session": {str(number): 0 for number in range(200_000)}},
        {str(number): 0 for number in range(200_000)},
    ],
)
def test_hints_that_are_far_too_long_are_ignored_unread(raw: Any) -> None:
    class Unread(dict[str, Any]):
        def items(self) -> Any:
            assert len(self) < 17, "read"
            return super().items()

    assert read(Unread(raw)) == NO_HINTS
    assert read(kv_load_tiers=[{"medium": "CPU"}] * 200_000) == NO_HINTS
