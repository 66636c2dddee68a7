"""What vLLM's scheduler half is to offer although it believes that it is stored.

The half passes over what a request loads. If that load fails, the engine computes those chunks,
and nobody offers them, until another request comes with the same prompt. So is it with what a
forward pass computes while it is loading: that store is never whole if the load fails, and it
was offered. So after a failed load the half goes back to where the chunks are missing, at once;
and once more when the stores are over that were under way then, for what is being stored is not
taken again.

This reaches into state that is nobody's interface. Where a release does not have it, vLLM's
half is left alone, and such chunks are stored by the next request that computes them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier.vllm import compat

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["RecomputedChunks"]


@dataclass(frozen=True, slots=True)
class _Load:
    """A load in flight: whose, into which blocks, and behind how many tokens."""

    status: Any
    blocks: Sequence[int]
    local_tokens: int


@dataclass(frozen=True, slots=True)
class _Return:
    """Where to go back to, per KV cache group, and the stores to be waited for."""

    status: Any
    chunks: Sequence[int]
    stores: frozenset[int]

    def go(self) -> None:
        """Let the half offer from there, unless the request is over."""
        if not self.status.req.is_finished():
            for state, chunk in zip(self.status.group_states, self.chunks, strict=True):
                state.next_stored_chunk_idx = min(state.next_stored_chunk_idx, chunk)


class RecomputedChunks:
    """Lets one scheduler half offer what is computed after a load that failed.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``.
    """

    def __init__(self, half: Any) -> None:  # noqa: ANN401 - vLLM's
        self._half = half
        self._known = compat.offers_can_be_repeated(half)
        self._loads: dict[int, _Load] = {}
        self._returns: list[_Return] = []

    def planned(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Note the load that the half just planned for ``request``, which has ``blocks``."""
        if not self._known:
            return
        status = self._half._req_status[request.request_id]  # noqa: SLF001
        job_id = max(status.transfer_jobs)  # the newest
        local_tokens = status.num_locally_computed_tokens
        own: list[int] = []
        if len(blocks.blocks) == 1:  # with several groups a block's number does not say whose
            (group,) = self._half.config.kv_group_configs
            first = local_tokens // group.tokens_per_block
            own = [block.block_id for block in blocks.blocks[0][first:]]
        self._loads[job_id] = _Load(status, own, local_tokens)

    def note_failed(self, output: KVConnectorOutput) -> list[str]:
        """Go back for the loads that ``output`` says failed; returns whose they are.

        Ranks end a load one by one, and a later one may lack more of it than the first.

        Args:
            output: What the half has not seen yet: it forgets the loads that are over.
        """
        if not self._loads:
            return []
        jobs = self._half._jobs  # noqa: SLF001
        found: list[str] = []
        requests: Collection[str] = getattr(output, "failed_recving", None) or ()
        for job_id, load in list(self._loads.items()):
            if job_id not in jobs:  # every rank has said all there is to say
                del self._loads[job_id]
                continue
            tokens = self._valid_tokens(load, output.invalid_block_ids, requests)
            if tokens is None:
                continue
            stores = load.status.transfer_jobs.intersection(jobs) - self._loads.keys()
            groups = self._half.config.kv_group_configs
            chunks = [tokens // group.tokens_per_chunk for group in groups]
            failed = _Return(load.status, chunks, frozenset(stores))
            failed.go()
            if stores:
                self._returns.append(failed)
            found.append(load.status.req.request_id)
        return found

    def go_back(self) -> list[str]:
        """Go back once more where no store is under way any more; returns for whom.

        To be called before the half looks for what to store.
        """
        found: list[str] = []
        if not self._returns:
            return found
        jobs = self._half._jobs  # noqa: SLF001
        waiting, self._returns = self._returns, []
        for failed in waiting:
            if failed.stores.isdisjoint(jobs):
                failed.go()
                found.append(failed.status.req.request_id)
            else:
                self._returns.append(failed)
        return found

    @property
    def is_waiting(self) -> bool:
        """Whether :meth:`go_back` may have something to do."""
        return bool(self._returns)

    def clear(self) -> None:
        """Forget all, for a reset: the half offers everything again."""
        self._loads.clear()
        self._returns.clear()

    def _valid_tokens(
        self, load: _Load, invalid: Collection[int], requests: Collection[str]
    ) -> int | None:
        """Return how many tokens of a failed load's request are there; None if it is well."""
        if load.status.req.request_id in requests:
            return load.local_tokens
        for at, block in enumerate(load.blocks if invalid else ()):
            if block in invalid:
                (group,) = self._half.config.kv_group_configs
                return load.local_tokens + at * int(group.tokens_per_block)
        return None
