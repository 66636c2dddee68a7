"""Quantities as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ConfigError
from kvtier.units import (
    UnitError,
    approximate_duration,
    approximate_size,
    format_duration,
    format_percentage,
    format_size,
    parse_duration,
    parse_percentage,
    parse_rate,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1B", 1),
        ("4096 B", 4096),
        ("64GiB", 64 << 30),
        ("64 GiB", 64 << 30),
        ("1TiB", 1 << 40),
        ("1TB", 10**12),
        ("1kB", 1000),
        ("1.5KiB", 1536),
    ],
)
def test_a_size_is_read_with_its_unit(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("64", "write 64GiB, 64MiB or 64B"),
        ("0", "write one such as 64GiB"),
        ("0GiB", "write one such as 64GiB"),
        ("64G", "write 64GiB (or 64GB, powers of 1000)"),
        ("64gib", "write 64GiB (or 64GB, powers of 1000)"),
        ("64K", "write 64KiB (or 64kB, powers of 1000)"),
        ("64Gb", "write 64GiB"),
        ("64 blocks", "units are B, KiB, MiB, GiB, TiB, PiB, kB, MB, GB, TB, PB"),
        ("-1GiB", "write one such as 64GiB"),
        ("a lot", "write one such as 64GiB"),
        ("1e3GiB", "write one such as 64GiB"),
        ("", "write one such as 64GiB"),
        ("0.3B", "write 1B"),
        ("99999PiB", "write less than 8192PiB"),
    ],
)
def test_a_size_that_is_not_clear_is_refused_with_a_remedy(text: str, remedy: str) -> None:
    with pytest.raises(UnitError) as caught:
        parse_size(text)
    assert caught.value.remedy == remedy


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("10s", 10.0), ("2 min", 120.0), ("1h", 3600.0), ("5us", 5e-6)],
)
def test_a_duration_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


def test_a_duration_that_no_clock_can_wait_for_is_refused() -> None:
    assert parse_duration("3650d") == 3650 * 86400
    with pytest.raises(
        UnitError, match="100000000h is more than ten years; write 3650d or less"
    ):
        parse_duration("100000000h")


@pytest.mark.parametrize("text", ["10", "10 seconds", "10m", "-1s", "soon", "1:30"])
def test_a_duration_that_is_not_clear_is_refused(text: str) -> None:
    with pytest.raises(UnitError, match="write"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "share"), [("0%", 0.0), ("12.5%", 0.125), ("100 %", 1.0)])
def test_a_percentage_is_a_share(text: str, share: float) -> None:
    assert parse_percentage(text) == share


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("0.5", "write 50%"),
        ("50", "write 50%"),
        ("101%", "write 0% to 100%"),
        ("-1%", "write one such as 50%"),
        ("half", "write one such as 50%"),
    ],
)
def test_a_percentage_that_is_not_clear_is_refused(text: str, remedy: str) -> None:
    with pytest.raises(UnitError) as caught:
        parse_percentage(text)
    assert caught.value.remedy == remedy


def test_a_rate_is_a_size_per_second() -> None:
    assert parse_rate("2GiB/s") == 2 << 30


@pytest.mark.parametrize("text", ["2GiB", "2GiB/min", "2/s", "0GiB/s", "/s"])
def test_a_rate_that_never_fills_anything_is_refused(text: str) -> None:
    with pytest.raises(UnitError):
        parse_rate(text)


def test_a_unit_error_is_caught_as_a_config_error_and_as_a_value_error() -> None:
    assert issubclass(UnitError, ConfigError)
    assert issubclass(UnitError, ValueError)


@given(st.integers(min_value=1, max_value=(1 << 59) - 1))
def test_a_formatted_size_reads_back_exactly(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == nbytes


@given(st.integers(min_value=0, max_value=10**12))
def test_a_formatted_duration_reads_back_exactly(microseconds: int) -> None:
    seconds = microseconds / 1e6
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(min_value=0, max_value=10**6))
def test_a_formatted_percentage_reads_back_exactly(millionths: int) -> None:
    share = millionths / 1e6
    assert parse_percentage(format_percentage(share)) == share


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 << 20, "10.0 MiB"),
        (512 << 30, "512 GiB"),
        (3 << 60, "3072 PiB"),
    ],
)
def test_an_approximate_size_has_three_digits_or_so(nbytes: int, text: str) -> None:
    assert approximate_size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.25, "250 ms"),
        (32.0, "32.0 s"),
        (59.99, "60.0 s"),
        (512, "8 min 32 s"),
        (3600, "1 h 0 min"),
        (100 * 86400, "100 d 0 h"),
    ],
)
def test_an_approximate_duration_has_two_units(seconds: float, text: str) -> None:
    assert approximate_duration(seconds) == text
