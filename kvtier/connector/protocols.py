"""What an engine shows the scheduler half, and what the scheduler half asks of a cache.

The names are vLLM's, so that its own ``Request``, ``KVCacheBlocks`` and ``KVCacheManager`` are
such objects as they are; another engine brings objects with the same few attributes. Nothing
here is written to: the scheduler half reads, and keeps what it needs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvtier.connector.context import RequestContext
from kvtier.connector.report.reporter import StatisticsSource
from kvtier.keys import ChunkKey
from kvtier.manager import LoadPlan, ResidencyEvent, StorePlan
from kvtier.manager.hits import Prompt

__all__ = [
    "AllocatedBlocks",
    "Block",
    "BlockTables",
    "BoundaryState",
    "Cache",
    "EngineRequest",
    "Step",
]


class EngineRequest(Protocol):
    """A request, for as long as its engine knows it."""

    @property
    def request_id(self) -> str:
        """The engine's name for it."""

    @property
    def num_tokens(self) -> int:
        """Tokens known now; under async scheduling the newest may still be missing."""

    @property
    def num_prompt_tokens(self) -> int:
        """How many of them are the prompt."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the engine's blocks before the current step."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One hash per ``tokens_per_hash`` known tokens, each covering all before it."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What whoever sent the request asks of the KV cache."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether everything must be computed, cached or not."""

    @property
    def shared_prefix_boundary(self) -> int:
        """Tokens after which it is known to leave another request's prefix; 0 for unknown."""

    def is_finished(self) -> bool:
        """Return whether it ended, for whatever reason."""


class Block(Protocol):
    """One block of the engine's memory."""

    @property
    def block_id(self) -> int:
        """Its number."""

    @property
    def is_null(self) -> bool:
        """Whether it stands for no block."""

    @property
    def block_hash(self) -> object | None:
        """What it holds; None while that is not computed or loaded."""


class AllocatedBlocks(Protocol):
    """A request's blocks."""

    @property
    def blocks(self) -> Sequence[Sequence[Block]]:
        """All blocks of the request, per KV cache group, first to last."""


class BlockTables(Protocol):
    """The engine's block tables; vLLM's ``KVCacheManager`` is one."""

    def get_blocks(self, request_id: str) -> AllocatedBlocks:
        """Return the blocks that a request has now; no blocks for one that has none."""


class BoundaryState(NamedTuple):
    """A recurrent state that the engine hands over for storing, in the step that computes it.

    Attributes:
        group: Index of its KV cache group.
        block_id: The block that holds it.
        tokens: Tokens that it follows.
    """

    group: int
    block_id: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine decided in one step.

    Attributes:
        num_scheduled_tokens: Tokens to compute, per scheduled request.
        started: Requests that were scheduled for the first time, or anew with all their blocks.
        preempted: Requests that lost their blocks.
        allocated: Blocks that were given to requests since the step before, or are copied into.
        overwritten: Those of ``allocated`` that workers write to before they are asked to end
            the stores that read them.
        states: Recurrent states to store, per request.
    """

    num_scheduled_tokens: Mapping[str, int]
    started: Collection[str] = ()
    preempted: Collection[str] = ()
    allocated: AbstractSet[int] = frozenset()
    overwritten: AbstractSet[int] = frozenset()
    states: Mapping[str, Sequence[BoundaryState]] = field(default_factory=dict)


class Cache(StatisticsSource, Protocol):
    """What the scheduler side drives: a :class:`~kvtier.connector.service.CacheService`."""

    @property
    def rests(self) -> bool:
        """Whether :meth:`end_step` would find nothing to do."""

    def begin_request(self, request: RequestContext) -> None:
        """Start remembering a request."""

    def end_request(self, request: RequestContext) -> None:
        """Forget a request; its loads and stores in flight go on."""

    def lookup(self, req_id: str, prompt: Prompt) -> int | None:
        """Return how many tokens can be loaded now; None to be asked at the next step."""

    def prepare_load(self, keys: Sequence[ChunkKey], req_id: str) -> LoadPlan:
        """Pin chunks that were hits in this step and say where they are."""

    def complete_load(self, req_id: str) -> None:
        """End a request's oldest load: chunks a worker could not load are dropped."""

    def prepare_store(self, keys: Sequence[ChunkKey], req_id: str) -> StorePlan | None:
        """Give new chunks slots; None when there is no room now."""

    def complete_store(self, keys: Collection[ChunkKey], req_id: str) -> None:
        """Make stored chunks hits if every worker recorded that they are whole."""

    def end_step(self, *, started: Iterable[str], preempted: Iterable[str]) -> None:
        """Close a scheduling step."""

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping while no request runs."""

    def take_events(self) -> list[ResidencyEvent]:
        """Return residency changes, removals before the stores that use their room."""

    def reset_cache(self) -> bool:
        """Make everything in every tier a miss; returns whether it is so after a restart."""

    def shutdown(self) -> None:
        """Close the tiers. Idempotent."""
