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
    """Number of slots of the RAM tier."""
    max_requests: int
    """Largest number of requests that the engine runs at the same time."""

    @property
    def stores(self) -> Sequence[StoreInfo]:
        """Return the engine's namespaces on this machine."""

    def add(self, line: int, tokens: Sequence[int], *, lora: str, cache_salt: str) -> str:
        """Queue a prompt. Return why the engine refuses the prompt, or "" if it accepts."""

    def step(self) -> Sequence[tuple[int, int, int]]:
        """Run one step.

        Returns:
            One tuple per prompt that ended: the number of the prompt's line, the number of
            tokens, and the number of tokens that came from a cache.
        """

    def has_work(self) -> bool:
        """Return whether the engine has a prompt to compute or a chunk to move."""

    def unwritten_chunks(self) -> int:
        """Return the number of chunks that a slower tier must still receive."""

    def abort(self) -> None:
        """Drop all queued and running prompts."""

    def close(self) -> None:
        """Write the remaining chunks, close the tiers and end the engine."""


class EngineSetup(ParsedArguments, Protocol):
    """The arguments of an engine that has not started yet.

    Attributes:
        block_tokens: Number of tokens of a block, if known before the engine starts.
    """

    block_tokens: int

    @property
    def identity(self) -> Fields:
        """The fields of a namespace's identity that the arguments determine."""

    def name_chunk(self, lora: str) -> Callable[[ChunkKey], ChunkKey]:
        """Return a function that adds the digest of adapter ``lora`` to a key of vLLM."""

    def start(self) -> WarmupEngine:
        """Start the engine and return it. The caller must close it. This call blocks."""

    def close(self) -> None:
        """Release the resources of this object. Idempotent."""


OpenEngine = Callable[[str, Sequence[str], Mapping[str, Any] | None], EngineSetup]
"""Opens an engine, given a model, other arguments and vLLM's ``--kv-transfer-config``."""
