"""Reads files of prompts: JSON Lines, with one prompt per line."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
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

__all__ = ["BadLine", "Prompt", "PromptLine", "check_prompt", "load_prompts"]

_CONTENTS: Final = ("prompt", "prompt_token_ids", "messages")
_CONTENT_REMEDY: Final = f"write one of {', '.join(_CONTENTS)}"
_MOST_TOKEN: Final = (1 << 32) - 1


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

    def with_tokens(self, number: int, tokens: Sequence[int]) -> Prompt:
        """Return this line's prompt, with the given line number and token ids."""
        return Prompt(number, array("I", tokens), self.priority, self.lora, self.cache_salt)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that was converted to token ids.

    Attributes:
        line: Number of the prompt's line, from 1.
        tokens: The token ids.
        priority: Prompts with smaller numbers are computed first.
        lora: Name of the prompt's LoRA adapter; empty for none.
        cache_salt: The prompt's cache salt; empty for none.
    """

    line: int
    tokens: Sequence[int]
    priority: int = 0
    lora: str = ""
    cache_salt: str = ""

    @property
    def order(self) -> tuple[Any, ...]:
        """Return a sort key that puts prompts with a common prefix next to each other.

        In this order each shared prefix is computed once. A prompt precedes all prompts that
        start with it.
        """
        return self.priority, self.lora, self.cache_salt, self.tokens, self.line


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line without a usable prompt.

    Attributes:
        line: The line's number, from 1.
        problem: Description of the problem and of the remedy.
    """

    line: int
    problem: str

    def error(self, path: Path) -> ConfigError:
        """Return the error to raise for this line of the file at ``path``."""
        return ConfigError(f"{printable(str(path))}:{self.line}: {self.problem}")


def check_prompt(
    prompt: Prompt, *, most_tokens: int, lora_paths: Mapping[str, str], vocabulary: int = 0
) -> None:
    """Check that an engine can compute ``prompt``.

    Args:
        prompt: The prompt.
        most_tokens: Number of tokens of the longest prompt that the engine accepts.
        lora_paths: Path of each LoRA adapter, by name.
        vocabulary: Number of token ids; 0 if unknown.

    Raises:
        ConfigError: The prompt is empty or too long, or its adapter or one of its tokens is
            unknown.
    """
    if not prompt.tokens:
        raise ConfigError("empty: it has no tokens; remove the line")
    if len(prompt.tokens) > most_tokens:
        problem = f"{len(prompt.tokens):,} tokens; the engine takes {most_tokens:,}"
        raise ConfigError(f"too long: {problem}; shorten it, or raise --max-model-len")
    if vocabulary and (largest := max(prompt.tokens)) >= vocabulary:
        remedy = f"the model's token ids end at {vocabulary - 1}"
        raise ConfigError(f"prompt_token_ids: {largest} is no token of the model; {remedy}")
    if prompt.lora and prompt.lora not in lora_paths:
        remedy = f"add it to the engine: --lora-modules {printable(prompt.lora)}=PATH"
        raise ConfigError(f"lora: {printable(prompt.lora)} is no adapter; {remedy}")


async def load_prompts(
    path: Path,
    to_prompt: Callable[[int, PromptLine], Awaitable[Prompt]],
    *,
    on_bad: Callable[[BadLine], None] | None,
) -> list[Prompt]:
    """Return the prompts in the file at ``path``, in the order in which to compute them.

    Args:
        path: The file.
        to_prompt: Converts a line to a prompt; raises ConfigError if this fails.
        on_bad: Called with each line that has no usable prompt. If None, such a line is an
            error.

    Raises:
        ConfigError: The file cannot be read or has no usable prompt, or a line is bad.
    """
    prompts = []
    async with aclosing(_read(path)) as lines:
        async for number, line in lines:
            try:
                prompts.append(await to_prompt(number, _parse(line)))
            except ConfigError as error:
                bad = BadLine(number, str(error))
                if on_bad is None:
                    raise bad.error(path) from error
                on_bad(bad)
    if not prompts:
        source = printable(str(path))
        raise ConfigError(f"--prompts {source}: has no usable prompt; write one a line")
    return sorted(prompts, key=lambda prompt: prompt.order)


async def _read(path: Path) -> AsyncGenerator[tuple[int, bytes], None]:
    """Yield each line of a file with its number; ignore blank lines at the end."""
    source = printable(str(path))
    blank: list[int] = []
    try:
        async with aiofiles.open(path, "rb") as file:
            number = 0
            async for line in file:
                number += 1
                blank.append(number)
                if line.strip():
                    for each in blank[:-1]:
                        yield each, b""
                    yield number, line
                    blank.clear()
    except FileNotFoundError as error:
        raise ConfigError(f"--prompts {source}: no such file; check the path") from error
    except IsADirectoryError as error:
        raise ConfigError(f"--prompts {source}: is a directory; name a file in it") from error
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise ConfigError(f"--prompts {source}: {problem}; check its permissions") from error


def _parse(line: bytes) -> PromptLine:
    if not line.strip():
        raise ConfigError("empty; remove the line")
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        why = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise ConfigError(f"not JSON ({why}); {_CONTENT_REMEDY} in an object") from error
    if not isinstance(content, dict):
        raise ConfigError(f"not an object; {_CONTENT_REMEDY} in one")
    try:
        return PromptLine.model_validate(content)
    except ValidationError as error:
        raise ConfigError(_problem(error)) from error


def _problem(error: ValidationError) -> str:
    """Describe the first problem of a line."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "extra_forbidden":
        name, known = str(first["loc"][0]), list(PromptLine.model_fields)
        remedy = f"write one of {', '.join(known)}{did_you_mean(name, known)}"
        return f"{printable(name)}: no such key; {remedy}"
    place = ".".join(str(part) for part in first["loc"])
    if not place:
        return str(first["msg"])
    return f"{printable(place)}: {first['msg'][:1].lower()}{first['msg'][1:]}"
