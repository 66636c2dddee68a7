"""The interface of the engine that a warm-up starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvtier.coverage import ParsedArguments
from kvtier.keys import ChunkKey
from kvtier.tiers.base import Fields

if TYPE_CHECKING:
    from kvtier.connector.figures import StoreInfo

__all__ = ["EngineSetup", "OpenEngine", "WarmupEngine"]


class WarmupEngine(Protocol):
    """A running engine, driven by one thread."""

    ram_chunks: int
    """Slots of the RAM tier."""
    max_requests: int
    """Requests that it runs at a time."""

    @property
    def stores(self) -> Sequence[StoreInfo]:
        """The places where the tiers keep chunks."""

    def add(self, line: int, tokens: Sequence[int], *, lora: str, cache_salt: str) -> str:
        """Queue a prompt; return why the engine refuses it, or an empty text."""

    def step(self) -> Sequence[tuple[int, int, int]]:
        """Run one step.

        Returns:
            One tuple per prompt that ended: its line, its number of tokens, and how many of
            these tokens came from a cache.
        """

    def has_work(self) -> bool:
        """Return whether the engine has a prompt to compute or a chunk to move."""

    def unwritten_chunks(self) -> int:
        """Return how many chunks a slower tier must still receive."""

    def abort(self) -> None:
        """Drop all queued and running prompts."""

    def close(self) -> None:
        """Write the remaining chunks, close the tiers and end the engine."""


class EngineSetup(ParsedArguments, Protocol):
    """An engine before its start, described by its arguments.

    Attributes:
        block_tokens: Tokens of a block, if known before the start.
    """

    block_tokens: int

    @property
    def identity(self) -> Fields:
        """The part of a store's identity that the arguments determine."""

    def name_chunk(self, lora: str) -> Callable[[ChunkKey], ChunkKey]:
        """Return a function that converts vLLM's key of a chunk to kvtier's, for an adapter."""

    def start(self) -> WarmupEngine:
        """Start the engine. This call blocks."""

    def close(self) -> None:
        """Release the resources of this object. Idempotent."""


OpenEngine = Callable[[str, Sequence[str], Mapping[str, Any] | None], EngineSetup]
"""Makes an engine of a model, of other arguments, and of vLLM's ``--kv-transfer-config``."""
