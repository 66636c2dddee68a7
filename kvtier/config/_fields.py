"""Types of fields that are text with a unit in YAML and a number in Python.

``capacity: 64GiB`` in a file and ``capacity_bytes=1 << 36`` in code are the same value. A file
must name a unit. Code may use a plain number, because the field's name has the unit. Validators
recognize a file by the validation context, which only the loader passes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from kvtier.units import (
    DURATION_PATTERN,
    PERCENTAGE_PATTERN,
    SIZE_PATTERN,
    UnitError,
    format_duration,
    format_percentage,
    format_size,
    parse_duration,
    parse_percentage,
    parse_size,
)

__all__ = [
    "RANK_PLACEHOLDER",
    "Duration",
    "FilePath",
    "Fraction",
    "Label",
    "Size",
    "path_problem",
    "refusal",
]

RANK_PLACEHOLDER: Final = "{data_parallel_rank}"
"""Placeholder for the data-parallel rank in a path."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_CONTROL_PROBLEM: Final = ("control characters", "write it without them")


def _quantity(parse: Callable[[str], float], example: str) -> BeforeValidator:
    """Return a validator that parses text with ``parse``.

    Python code may also pass a number, which the validator returns unchanged. A number in a
    file is parsed like text.
    """

    def read(value: Any, info: ValidationInfo) -> Any:  # noqa: ANN401 - pydantic's contract
        if isinstance(value, str):
            return parse(value)
        if info.context is None:
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return parse(str(value))
        raise UnitError(f"not a value such as {example}", f"write one such as {example}")

    return BeforeValidator(read)


def refusal(problem: str, remedy: str) -> PydanticCustomError:
    """Return an error for a validator to raise, with a problem and a remedy."""
    words = {"problem": problem, "remedy": remedy}
    return PydanticCustomError("kvtier", "{problem}; {remedy}", words)


def path_problem(path: Path) -> tuple[str, str] | None:
    """Return the problem and the remedy if a tier must not use ``path``, else None."""
    if not path.is_absolute():
        remedy = "write it from the root: engines start in different directories"
        return "not an absolute path", remedy
    if _CONTROL.search(str(path)):
        return _CONTROL_PROBLEM
    if not os.path.normpath(path).strip("/"):
        remedy = "name a directory that only kvtier fills, such as /var/lib/kvtier"
        return "the root of the file system", remedy
    return None


def _without_other_braces(path: Path) -> Path:
    """Refuse a misspelt placeholder, because it would become a directory's name."""
    if re.search(r"[{}]", str(path).replace(RANK_PLACEHOLDER, "")):
        problem = f"a brace outside {RANK_PLACEHOLDER}, the only placeholder"
        raise refusal(problem, "write that, or a path without braces")
    return path


def _without_problem(path: Path) -> Path:
    if (problem := path_problem(path)) is not None:
        raise refusal(*problem)
    return path


def _without_control(text: str) -> str:
    if _CONTROL.search(text):
        raise refusal(*_CONTROL_PROBLEM)
    return text


Label = Annotated[str, AfterValidator(_without_control)]
"""A text without control characters, for messages and file names."""

Size = Annotated[
    int,
    Field(gt=0, lt=1 << 63),
    _quantity(parse_size, "64GiB"),
    PlainSerializer(format_size, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": SIZE_PATTERN}),
]
"""Number of bytes, more than 0."""

Duration = Annotated[
    float,
    Field(gt=0, allow_inf_nan=False),
    _quantity(parse_duration, "10s"),
    PlainSerializer(format_duration, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN}),
]
"""Number of seconds, more than 0."""

Fraction = Annotated[
    float,
    Field(ge=0, le=1),
    _quantity(parse_percentage, "50%"),
    PlainSerializer(format_percentage, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": PERCENTAGE_PATTERN}),
]
"""A share from 0 to 1."""

FilePath = Annotated[
    Path,
    Field(strict=False),  # Python code may give text
    AfterValidator(_without_other_braces),
    AfterValidator(_without_problem),
]
"""An absolute path, which may contain a :data:`RANK_PLACEHOLDER`."""
