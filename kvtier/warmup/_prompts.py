"""Reads files of prompts: JSON Lines, one prompt a line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Self

import aiofiles
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvtier.errors import ConfigError, did_you_mean
from kvtier.printable import printable

__all__ = ["BadLine", "Line", "Prompt", "PromptLine", "batches", "read_prompts"]

_CONTENTS: Final = ("prompt", "prompt_token_ids", "messages")
_CONTENT_REMEDY: Final = f"write one of {', '.join(_CONTENTS)}"
_MOST_TOKEN: Final = (1 << 32) - 1
_LINES_AT_ONCE: Final = 256


def _as_tuple(value: Any) -> Any:  # noqa: ANN401 - pydantic's contract
    return tuple(value) if isinstance(value, list) else value


class PromptLine(BaseModel):
    """One line of a file of prompts."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompt: str | None = Field(default=None, min_length=1)
    """A text, as in a request for a completion."""
    prompt_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0, le=_MOST_TOKEN)], ...] | None,
        Field(min_length=1),
        BeforeValidator(_as_tuple),
    ] = None
    """Token ids."""
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    """A conversation, as in a request for a chat completion."""
    tools: list[dict[str, Any]] | None = None
    """The tools of a conversation."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template."""
    cache_salt: str = ""
    """The request's ``cache_salt``."""
    lora: str = ""
    """Name of a LoRA adapter of the engine."""
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    """Prompts with smaller numbers are computed first."""

    @model_validator(mode="after")
    def _has_one_content(self) -> Self:
        given = [name for name in _CONTENTS if getattr(self, name) is not None]
        if len(given) != 1:
            what = f"has {' and '.join(given)}" if given else "has no prompt"
            raise PydanticCustomError("kvtier", f"{what}; {_CONTENT_REMEDY}")
        if self.messages is None and (self.tools or self.chat_template_kwargs):
            problem = "tools and chat_template_kwargs belong to messages"
            raise PydanticCustomError("kvtier", f"{problem}; leave them out")
        return self


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids.

    Attributes:
        line: Number of the prompt's line, from 1.
        tokens: The token ids.
        priority: Prompts with smaller numbers are computed first.
        lora: Name of the prompt's LoRA adapter; empty for none.
        cache_salt: The prompt's cache salt; empty for none.
    """

    line: int
    tokens: tuple[int, ...]
    priority: int = 0
    lora: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no usable prompt.

    Attributes:
        line: The line's number, from 1.
        problem: The problem, and what to write instead.
    """

    line: int
    problem: str

    def error(self, path: Path) -> ConfigError:
        """Return the error to raise for this line, if bad lines are fatal."""
        return ConfigError(f"{printable(str(path))}:{self.line}: {self.problem}")


Line = tuple[int, PromptLine] | BadLine
"""A line's number and content, or what is wrong with it."""


async def read_prompts(path: Path) -> AsyncGenerator[Line, None]:
    """Yield each line of the file at ``path``: its number and content, or its problem.

    Blank lines at the end of the file are ignored.

    Raises:
        ConfigError: The file cannot be read.
    """
    source = printable(str(path))
    try:
        async with aiofiles.open(path, "rb") as file:
            number = 0
            blank: list[int] = []
            async for raw in file:
                number += 1
                if not raw.strip():
                    blank.append(number)
                    continue
                for empty in blank:
                    yield BadLine(empty, "empty; remove the line")
                blank.clear()
                yield _parse(number, raw)
    except FileNotFoundError as error:
        raise ConfigError(f"--prompts {source}: no such file; check the path") from error
    except IsADirectoryError as error:
        raise ConfigError(f"--prompts {source}: is a directory; name a file in it") from error
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise ConfigError(f"--prompts {source}: {problem}; check its permissions") from error


def _parse(number: int, raw: bytes) -> Line:
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        why = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        return BadLine(number, f"not JSON ({why}); {_CONTENT_REMEDY} in an object")
    if not isinstance(content, dict):
        return BadLine(number, f"not an object; {_CONTENT_REMEDY} in one")
    try:
        return number, PromptLine.model_validate(content)
    except ValidationError as error:
        return BadLine(number, _problem(error))


def _problem(error: ValidationError) -> str:
    """Return the first problem of a line as text."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "extra_forbidden":
        name, known = str(first["loc"][0]), list(PromptLine.model_fields)
        remedy = f"write one of {', '.join(known)}{did_you_mean(name, known)}"
        return f"{printable(name)}: no such key; {remedy}"
    place = ".".join(str(part) for part in first["loc"])
    if not place:
        return str(first["msg"])
    return f"{printable(place)}: {first['msg'][:1].lower()}{first['msg'][1:]}"


async def batches(lines: AsyncGenerator[Line, None]) -> AsyncGenerator[list[Line], None]:
    """Yield ``lines`` in lists, so that the job's thread handles many lines per call."""
    batch: list[Line] = []
    async with contextlib.aclosing(lines):
        async for line in lines:
            batch.append(line)
            if len(batch) == _LINES_AT_ONCE:
                yield batch
                batch = []
    if batch:
        yield batch
