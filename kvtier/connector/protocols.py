"""The engine's objects that the scheduler side reads.

The names are vLLM's, so that vLLM's ``Request``, ``KVCacheBlocks`` and ``KVCacheManager`` fit
as they are. Another engine must provide objects with the same attributes. The scheduler side
only reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from kvtier.manager import prompt_tokens

__all__ = [
    "AllocatedBlocks",
    "Block",
    "BlockTables",
    "BoundaryState",
    "EngineRequest",
    "RequestContext",
    "Step",
]


class RequestContext(Protocol):
    """A request as the cache sees it; vLLM's ``ReqContext`` has these attributes."""

    @property
    def req_id(self) -> str:
        """The engine's id of the request."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """The client's parameters for KV transfer."""


class EngineRequest(Protocol):
    """A request as its engine sees it."""

    @property
    def request_id(self) -> str:
        """The engine's id of the request."""

    @property
    def num_tokens(self) -> int:
        """Number of known tokens; under async scheduling, the newest tokens may be missing."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens with KV in the engine's blocks before the current step."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One hash per ``tokens_per_hash`` known tokens; each also covers earlier tokens."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """The client's parameters for KV transfer."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether all tokens must be computed, even if their KV is cached."""

    @property
    def shared_prefix_boundary(self) -> int:
        """Number of tokens of the prefix that another request shares; 0 if unknown."""

    def is_finished(self) -> bool:
        """Return whether the request ended, for any reason."""


class Block(Protocol):
    """One block of the engine's memory."""

    @property
    def block_id(self) -> int:
        """Number of the block."""

    @property
    def is_null(self) -> bool:
        """Whether this object is the placeholder for a missing block."""

    @property
    def block_hash(self) -> object | None:
        """Hash of the block's content; None until the content is computed or loaded."""


class AllocatedBlocks(Protocol):
    """The blocks of a request."""

    @property
    def blocks(self) -> Sequence[Sequence[Block]]:
        """All blocks of the request, per KV cache group, first to last."""


class BlockTables(Protocol):
    """The engine's block tables, such as vLLM's ``KVCacheManager``."""

    def get_blocks(self, request_id: str) -> AllocatedBlocks:
        """Return the blocks that a request has now; may be empty."""


class BoundaryState(NamedTuple):
    """A recurrent state that the engine offers for storing, in the step that computes it.

    Attributes:
        group: Index of the state's KV cache group.
        block_id: The block that holds the state.
        tokens: Number of tokens that the state covers.
    """

    group: int
    block_id: int
    tokens: int


_NO_STATES: Final[Mapping[str, Sequence[BoundaryState]]] = MappingProxyType({})


class Step(NamedTuple):
    """The engine's decisions in one step.

    Attributes:
        num_scheduled_tokens: Number of tokens to compute, per scheduled request.
        started: Requests that are scheduled for the first time, again after a preemption, or
            after their prompt was continued.
        preempted: Requests that lost their blocks.
        allocated: Blocks that requests got since the previous step, and targets of block
            copies.
        overwritten: The ``allocated`` blocks that workers write to before they flush stores.
        states: Recurrent states to store, per request.
    """

    num_scheduled_tokens: Mapping[str, int]
    started: Collection[str] = ()
    preempted: Collection[str] = ()
    allocated: AbstractSet[int] = frozenset()
    overwritten: AbstractSet[int] = frozenset()
    states: Mapping[str, Sequence[BoundaryState]] = _NO_STATES

    @property
    def prompt_tokens(self) -> int:
        """Number of scheduled tokens that belong to prompts."""
        scheduled = self.num_scheduled_tokens.values()
        # Most steps generate one token for each request, and then a sum is faster.
        return 0 if sum(scheduled) == len(scheduled) else prompt_tokens(scheduled)

    @property
    def only_generates(self) -> bool:
        """Whether the step only generates one token for each request."""
        scheduled = self.num_scheduled_tokens.values()
        others = (self.started, self.preempted, self.allocated, self.states)
        return max(scheduled, default=0) == 1 and not any(others)
