"""Sizes, durations, percentages and rates with units: ``64GiB``, ``250ms``, ``50%``.

A number without a unit is refused: ``64`` could be bytes, blocks or gigabytes. Every error
says what to write instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

from kvtier.errors import ConfigError

__all__ = [
    "DURATION_PATTERN",
    "PERCENTAGE_PATTERN",
    "SIZE_PATTERN",
    "UnitError",
    "approximate_duration",
    "approximate_rate",
    "approximate_size",
    "format_duration",
    "format_percentage",
    "format_size",
    "parse_duration",
    "parse_percentage",
    "parse_rate",
    "parse_size",
]

_BINARY: Final = {
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "PiB": 1 << 50,
}
_DECIMAL: Final = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_SIZES: Final[Mapping[str, int]] = {"B": 1, **_BINARY, **_DECIMAL}
_TOO_MANY: Final = 1 << 63
_LONGEST: Final = Decimal(10 * 365 * 86400)
_SECONDS: Final[Mapping[str, Decimal]] = {
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_NUMBER: Final = r"[0-9]{1,18}(?:\.[0-9]{1,18})?"
_QUANTITY: Final = re.compile(rf"(-?{_NUMBER}) ?([A-Za-z%]*)", re.ASCII)

SIZE_PATTERN: Final = rf"^{_NUMBER} ?(?:{'|'.join(_SIZES)})$"
"""Regular expression of a size, for JSON Schema."""
DURATION_PATTERN: Final = rf"^{_NUMBER} ?(?:{'|'.join(_SECONDS)})$"
"""Regular expression of a duration, for JSON Schema."""
PERCENTAGE_PATTERN: Final = rf"^{_NUMBER} ?%$"
"""Regular expression of a percentage, for JSON Schema."""


class UnitError(ConfigError, ValueError):
    """An invalid quantity.

    The class also derives from ``ValueError``, so that pydantic reports the key of the invalid
    value.

    Attributes:
        problem: The problem.
        remedy: What to write instead.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem = problem
        self.remedy = remedy


def parse_size(text: str) -> int:
    """Return the size ``text`` in bytes; units are binary (``GiB``) or decimal (``GB``).

    Raises:
        UnitError: The text is not a size, lacks a unit or has an ambiguous unit. Or the size is
            0 or less, 8 EiB or more, or not a whole number of bytes.

    >>> parse_size("1.5KiB"), parse_size("2TB")
    (1536, 2000000000000)
    """
    number, unit = _split(text, kind="size", example="64GiB")
    if unit not in _SIZES:
        raise UnitError(*_wrong_size_unit(text, number, unit))
    nbytes = number * _SIZES[unit]
    if not nbytes:
        raise UnitError(f"{text} is no size", "write one such as 64GiB")
    if nbytes >= _TOO_MANY:
        raise UnitError(f"{text} is too large", "write less than 8192PiB")
    if nbytes != int(nbytes):
        raise UnitError(f"{text} is not a whole number of bytes", f"write {int(nbytes) or 1}B")
    return int(nbytes)


def parse_duration(text: str, *, likely_unit: str = "s") -> float:
    """Return the duration ``text`` in seconds.

    Args:
        text: A number with a unit.
        likely_unit: The unit to suggest if ``text`` has none.

    Raises:
        UnitError: The text is not a duration, lacks a unit or has an unknown unit. Or the
            duration is negative or longer than ten years.

    >>> parse_duration("250ms"), parse_duration("2min")
    (0.25, 120.0)
    """
    number, unit = _split(text, kind="duration", example="10s")
    if unit not in _SECONDS:
        problem = f"{unit!r} is not a unit of time" if unit else f"{text} has no unit"
        remedy = f"write {number}{likely_unit}; units are {', '.join(_SECONDS)}"
        raise UnitError(problem, remedy)
    seconds = number * _SECONDS[unit]
    if seconds > _LONGEST:
        raise UnitError(f"{text} is more than ten years", "write 3650d or less")
    return float(seconds)


def parse_percentage(text: str) -> float:
    """Return the percentage ``text`` as a fraction, 0 to 1.

    Raises:
        UnitError: The text is not a percentage, lacks the percent sign, or is outside 0% to
            100%.

    >>> parse_percentage("12.5%")
    0.125
    """
    number, unit = _split(text, kind="percentage", example="50%")
    if unit not in {"", "%"} and unit not in _SIZES:
        raise UnitError(f"{unit!r} is not a percent sign", f"write {_plain(number)}%")
    if unit != "%":
        percent = number * 100 if number <= 1 and not unit else number
        raise UnitError(f"{text} has no percent sign", f"write {_plain(percent)}%")
    if number > 100:
        raise UnitError(f"{text} is more than 100%", "write 0% to 100%")
    return float(number / 100)


def parse_rate(text: str) -> int:
    """Return the rate ``text``, such as ``2GiB/s``, in bytes per second.

    Raises:
        UnitError: The text is not a rate, or the rate is not positive.

    >>> parse_rate("2GiB/s")
    2147483648
    """
    remedy = "write a size per second, such as 2GiB/s"
    size, slash, per = text.strip().partition("/")
    if not slash or per.strip() != "s":
        raise UnitError(f"{text} is not a rate", remedy)
    try:
        return parse_size(size)
    except UnitError as error:
        raise UnitError(error.problem, remedy) from error


def format_size(nbytes: int) -> str:
    """Return ``nbytes`` exactly, in the largest binary unit that leaves no fraction.

    >>> format_size(1 << 29), format_size(1_000_000_001)
    ('512MiB', '1000000001B')
    """
    for unit, factor in reversed(_BINARY.items()):
        if nbytes and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return f"{nbytes}B"


def format_duration(seconds: float) -> str:
    """Return ``seconds`` exactly, in milliseconds, seconds or days.

    >>> format_duration(0.25), format_duration(90.0), format_duration(604800.0)
    ('250ms', '90s', '7d')
    """
    exact = Decimal(repr(seconds))
    if exact and not exact % 86400:
        return f"{_plain(exact / 86400)}d"
    if 0 < exact < 1:
        return f"{_plain(exact * 1000)}ms"
    return f"{_plain(exact)}s"


def format_percentage(share: float) -> str:
    """Return ``share`` (0 to 1) exactly, as a percentage.

    >>> format_percentage(0.125)
    '12.5%'
    """
    return f"{_plain(Decimal(repr(share)) * 100)}%"


def approximate_size(nbytes: float) -> str:
    """Return ``nbytes`` rounded to about three digits.

    >>> approximate_size(4096), approximate_size(55_000_000)
    ('4.00 KiB', '52.5 MiB')
    """
    value, unit = float(nbytes), "B"
    for name, factor in _BINARY.items():
        if nbytes < factor:
            break
        value, unit = nbytes / factor, name
    if unit == "B":
        return f"{value:.0f} B"
    return f"{value:.{_digits(value)}f} {unit}"


def approximate_rate(bytes_per_s: float) -> str:
    """Return a rate with two decimals, in units of powers of 1000, as in data sheets.

    >>> approximate_rate(2_500_000_000), approximate_rate(30_000_000), approximate_rate(2000)
    ('2.50 GB/s', '30.00 MB/s', '2.00 kB/s')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if bytes_per_s >= factor / 10:
            return f"{bytes_per_s / factor:.2f} {unit}/s"
    return f"{bytes_per_s / 1e3:.2f} kB/s"


def approximate_duration(seconds: float) -> str:
    """Return ``seconds`` as text, rounded to one or two units.

    >>> approximate_duration(0.02), approximate_duration(74), approximate_duration(90_000)
    ('20 ms', '1 min 14 s', '1 d 1 h')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.{_digits(seconds)}f} s"
    whole = round(seconds)
    for large, small, factor, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60)):
        if whole >= factor:
            return f"{whole // factor:,} {large} {whole % factor // part} {small}"
    return f"{whole // 60} min {whole % 60} s"


def _split(text: str, *, kind: str, example: str) -> tuple[Decimal, str]:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise UnitError(f"{text!r} is not a {kind}", f"write one such as {example}")
    number, unit = Decimal(match[1]), match[2]
    if number.is_signed():
        raise UnitError(f"{text} is negative", f"write one such as {example}")
    return number, unit


def _wrong_size_unit(text: str, number: Decimal, unit: str) -> tuple[str, str]:
    if not unit and not number:
        return f"{text} is no size", "write one such as 64GiB"
    if not unit:
        return f"{text} has no unit", f"write {number}GiB, {number}MiB or {number}B"
    if unit in {"b", "bit", "Gb", "Mb", "Tb"}:
        return f"{unit!r} may be bits or bytes", f"write {number}{unit[0].upper()}iB"
    prefix = unit[0].upper()
    if prefix in "KMGTP":
        decimal = "kB" if prefix == "K" else f"{prefix}B"
        remedy = f"write {number}{prefix}iB (or {number}{decimal}, powers of 1000)"
        return f"{unit!r} is not a unit of size", remedy
    return f"{unit!r} is not a unit of size", f"units are {', '.join(_SIZES)}"


def _plain(number: Decimal) -> str:
    """Return ``number`` without exponent and without trailing zeros."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _digits(value: float) -> int:
    return 2 if value < 10 else 1 if value < 100 else 0
