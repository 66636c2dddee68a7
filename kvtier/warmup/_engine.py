"""The interface of the engine that a warm-up starts, and vLLM's implementation."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey
from kvtier.tiers.base import Fields
from kvtier.warmup._prompts import Prompt, PromptLimits, PromptLine

if TYPE_CHECKING:
    from kvtier.connector.figures import StoreInfo

__all__ = ["EngineSetup", "OpenEngine", "WarmupEngine", "open_vllm", "to_prompt"]


class WarmupEngine(Protocol):
    """A running engine, driven by one thread."""

    ram_chunks: int
    """Number of slots of the RAM tier."""
    max_requests: int
    """Largest number of requests that the engine runs at the same time."""

    @property
    def stores(self) -> Sequence[StoreInfo]:
        """Return the engine's namespaces on this machine."""

    def add(self, line: int, tokens: Sequence[int], *, lora: str, cache_salt: str) -> str:
        """Queue a prompt; return the reason if the engine refuses it, else an empty text."""

    def step(self) -> Sequence[tuple[int, int, int]]:
        """Run one step.

        Returns:
            One tuple per prompt that ended: the prompt's line, its number of tokens, and the
            number of these tokens that came from a cache.
        """

    def has_work(self) -> bool:
        """Return whether the engine has a prompt to compute or a chunk to move."""

    def unwritten_chunks(self) -> int:
        """Return the number of chunks that a slower tier must still receive."""

    def abort(self) -> None:
        """Drop all queued and running prompts."""

    def close(self) -> None:
        """Write the remaining chunks, close the tiers and end the engine."""


class EngineSetup(PromptLimits, Protocol):
    """An engine before its start, described by its arguments.

    Attributes:
        algorithm: vLLM's ``--prefix-caching-hash-algo``.
        block_tokens: Number of tokens of a block, if known before the start.
    """

    algorithm: str
    block_tokens: int

    @property
    def identity(self) -> Fields:
        """The part of a namespace's identity that the arguments determine."""

    def tokens_of_text(self, text: str) -> Sequence[int]:
        """Return the token ids of a text."""

    def tokens_of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_arguments: Mapping[str, Any] | None,
    ) -> Sequence[int]:
        """Return the token ids of a conversation."""

    def name_chunk(self, lora: str) -> Callable[[ChunkKey], ChunkKey]:
        """Return a function that converts an adapter's chunk keys from vLLM's to kvtier's."""

    def start(self) -> WarmupEngine:
        """Start the engine. This call blocks."""

    def close(self) -> None:
        """Release the resources of this object. Idempotent."""


OpenEngine = Callable[[str, Sequence[str], Mapping[str, Any] | None], EngineSetup]
"""Takes a model, other arguments and vLLM's ``--kv-transfer-config``; makes an engine."""


def open_vllm(
    model: str, arguments: Sequence[str], transfer: Mapping[str, Any] | None
) -> EngineSetup:
    """Return vLLM's engine for arguments of ``vllm serve``. Importing vLLM takes seconds.

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
    setup: EngineSetup = module.EngineSetup(model, arguments, transfer)
    return setup


def to_prompt(number: int, line: PromptLine, setup: Callable[[], EngineSetup]) -> Prompt:
    """Return the prompt in a line, as token ids.

    Args:
        number: Number of the line, from 1.
        line: Content of the line.
        setup: Returns the engine; called only if the line needs the engine.

    Raises:
        ConfigError: The engine cannot convert the line to tokens.
    """
    if line.prompt_token_ids is not None:
        return line.with_tokens(number, line.prompt_token_ids)
    if line.messages is None:
        return line.with_tokens(number, setup().tokens_of_text(line.prompt or ""))
    tokens = setup().tokens_of_chat(line.messages, line.tools, line.chat_template_kwargs)
    return line.with_tokens(number, tokens)
