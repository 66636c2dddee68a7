"""Parses the arguments of ``vllm serve`` with vLLM, and converts text to token ids."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvtier.coverage._prompts import Prompt, PromptLine
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.vllm.offline import OfflineSetup

__all__ = ["ParsedArguments", "open_vllm", "to_prompt"]


class ParsedArguments(Protocol):
    """The arguments of an engine, and the tokenizer that they name.

    Attributes:
        algorithm: vLLM's ``--prefix-caching-hash-algo``.
        most_tokens: Number of tokens of the longest prompt that the engine accepts.
        vocabulary: Number of token ids.
    """

    algorithm: str
    most_tokens: int
    vocabulary: int

    @property
    def lora_paths(self) -> Mapping[str, str]:
        """Path of each LoRA adapter, by name."""

    def tokens_of_text(self, text: str) -> Sequence[int]:
        """Return the token ids of a text."""

    def tokens_of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_arguments: Mapping[str, Any] | None,
    ) -> Sequence[int]:
        """Return the token ids of a conversation."""


def open_vllm(
    model: str, arguments: Sequence[str], transfer: Mapping[str, Any] | None
) -> OfflineSetup:
    """Parse ``arguments`` of ``vllm serve`` with vLLM. This call takes seconds.

    Raises:
        ConfigError: vLLM is not installed, or refuses the arguments.
    """
    try:
        module = importlib.import_module("kvtier.vllm.offline")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in {"vllm", "torch"}:
            raise
        remedy = "install it with: pip install 'kvtier[vllm]'"
        raise ConfigError(f"texts and engines need the package {package}; {remedy}") from error
    setup: OfflineSetup = module.OfflineSetup(model, arguments, transfer)
    return setup


def to_prompt(number: int, line: PromptLine, setup: Callable[[], ParsedArguments]) -> Prompt:
    """Convert a line to a prompt of token ids.

    Args:
        number: Number of the line.
        line: Content of the line.
        setup: Returns the parsed arguments; called only if the line is text or a chat.

    Raises:
        ConfigError: The line cannot be converted to token ids.
    """
    if line.prompt_token_ids is not None:
        return line.with_tokens(number, line.prompt_token_ids)
    if line.messages is None:
        return line.with_tokens(number, setup().tokens_of_text(line.prompt or ""))
    tokens = setup().tokens_of_chat(line.messages, line.tools, line.chat_template_kwargs)
    return line.with_tokens(number, tokens)
