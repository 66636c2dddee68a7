"""The interface of the engines that compute a warm-up's prompts, and vLLM's implementation."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey
from kvtier.printable import printable
from kvtier.warmup._prefill import PrefillEngine
from kvtier.warmup._prompts import Prompt, PromptLine

__all__ = [
    "EngineSetup",
    "OpenEngine",
    "WarmupEngine",
    "check_prompt",
    "open_vllm",
    "to_prompt",
]


class StorePlace(Protocol):
    """Where one tier keeps its chunks, as an engine reports it.

    :class:`kvtier.connector.figures.StoreInfo` is one.
    """

    @property
    def tier(self) -> str:
        """Name of the tier."""

    @property
    def namespace(self) -> str:
        """Name of the engine's directory in the store."""

    @property
    def path(self) -> str:
        """The store; empty if the tier has none."""


class WarmupEngine(PrefillEngine, Protocol):
    """A running engine."""

    @property
    def stores(self) -> Sequence[StorePlace]:
        """The places where the tiers keep chunks."""

    def close(self) -> None:
        """Write the remaining chunks, close the tiers and end the engine."""


class PromptLimits(Protocol):
    """Limits on the prompts that an engine accepts."""

    @property
    def most_tokens(self) -> int:
        """Number of tokens of the longest prompt that the engine accepts."""

    @property
    def lora_paths(self) -> Mapping[str, str]:
        """Path of each LoRA adapter, by name."""


class EngineSetup(PromptLimits, Protocol):
    """An engine before its start, described by its arguments.

    Attributes:
        algorithm: vLLM's ``--prefix-caching-hash-algo``.
        block_tokens: Tokens of a block, if known before the start.
    """

    algorithm: str
    block_tokens: int

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
        """Return a function that converts vLLM's key of a chunk to kvtier's, for an adapter."""

    def start(self) -> WarmupEngine:
        """Start the engine. This call blocks."""

    def close(self) -> None:
        """Release the resources of this object. Idempotent."""


OpenEngine = Callable[[str, Sequence[str], Mapping[str, Any] | None], EngineSetup]
"""Makes an engine of a model, of other arguments, and of vLLM's ``--kv-transfer-config``."""


def open_vllm(
    model: str, arguments: Sequence[str], transfer: Mapping[str, Any] | None
) -> EngineSetup:
    """Return vLLM's engine for ``arguments`` of ``vllm serve``. Importing vLLM takes seconds.

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


def to_prompt(
    number: int, line: PromptLine, setup: EngineSetup | Callable[[], EngineSetup]
) -> Prompt:
    """Return the prompt in a line, as token ids.

    Args:
        number: Number of the line.
        line: Its content.
        setup: The engine, or a function that returns it; called only if the line needs it.

    Raises:
        ConfigError: The engine cannot compute the line as a prompt.
    """
    if line.prompt_token_ids is not None:
        tokens: Sequence[int] = line.prompt_token_ids
    else:
        engine = setup() if callable(setup) else setup
        if line.messages is not None:
            tokens = engine.tokens_of_chat(line.messages, line.tools, line.chat_template_kwargs)
        else:
            tokens = engine.tokens_of_text(line.prompt or "")
    return Prompt(number, tuple(tokens), line.priority, line.lora, line.cache_salt)


def check_prompt(prompt: Prompt, engine: PromptLimits) -> None:
    """Check that ``engine`` can compute ``prompt``.

    Raises:
        ConfigError: The prompt is empty or too long, or its adapter is unknown.
    """
    if not prompt.tokens:
        raise ConfigError("empty: the tokenizer makes no token of it; remove the line")
    if len(prompt.tokens) > engine.most_tokens:
        problem = f"{len(prompt.tokens):,} tokens; the engine takes {engine.most_tokens:,}"
        raise ConfigError(f"too long: {problem}; shorten it, or raise --max-model-len")
    if prompt.lora and prompt.lora not in engine.lora_paths:
        remedy = f"add it to the engine: --lora-modules {printable(prompt.lora)}=PATH"
        raise ConfigError(f"lora: {printable(prompt.lora)} is no adapter; {remedy}")
