"""Which requests load within the forward pass of their first step, behind vLLM's own half.

With ``transfer.load_mode: layerwise`` a request whose chunks are all whole in RAM joins the
batch at once; the workers copy its KV layer by layer, each before the model reads it. vLLM's
interface foresees that, its offloading half does not, so four things of that half are put right
here.

* **It loads into blocks without a hash.** vLLM hashes the blocks of a request that is
  scheduled at once before it asks for the load, so the half would find nothing to load. It is
  shown the same blocks without their hashes.
* **It asserts that a request that stores has no load in flight.** One that loads within its
  first step may fill a chunk in that step. The load is hidden from the half while it looks for
  what to store.
* **Blocks that are hashed may be shared**, by a request that is scheduled in the same step and
  computes from them. If the load then fails, that is one request more to be computed again,
  and vLLM does so in the right order only if both are scheduled together. So such a request
  waits a step.
* **A load that fails leaves hashed blocks of wrong content**, which vLLM keeps if it is going
  to compute them again: until then, others would find them. They lose their hashes.

At least one token must be left to compute. Where the hit is all of the prompt, its last block
is computed, not loaded: were it loaded, the copy and the model would write to it at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtier.vllm import compat
from kvtier.vllm.connector_contract import (
    LOADS_BEFORE_THE_PASS,
    FullAttentionSpec,
    KVCacheBlocks,
)
from kvtier.vllm.manager import KVTierManager

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["InStepLoads", "why_not_in_step"]


def why_not_in_step(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    half: Any,  # noqa: ANN401 - vLLM's
) -> str:
    """Return why this engine cannot load within the forward pass; empty if it can.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: The engine's KV cache groups.
        half: vLLM's scheduler half.
    """
    groups = kv_cache_config.kv_cache_groups
    kind = groups[0].kv_cache_spec
    layout = compat.kv_cache_layout(vllm_config)
    obstacles = (
        (not LOADS_BEFORE_THE_PASS, "it needs vLLM 0.30 or later"),
        (
            not compat.half_is_known(half),
            "the scheduler half of this vLLM is not one that kvtier knows",
        ),
        (
            len(groups) > 1,
            (
                f"the model has {len(groups)} KV cache groups, and only with one can vLLM be "
                "told of a load that failed within the forward pass"
            ),
        ),
        (not isinstance(kind, FullAttentionSpec), f"the model's KV is {type(kind).__name__}"),
        (
            bool(vllm_config.scheduler_config.async_scheduling),
            (
                "with asynchronous scheduling the next step begins before it is known whether "
                "a load worked; start vLLM with --no-async-scheduling"
            ),
        ),
        (
            vllm_config.speculative_config is not None,
            "a draft model reads KV behind the forward pass",
        ),
        (
            not layout.startswith("L"),
            f"the KV cache's layout, {layout}, keeps all layers of a block together",
        ),
    )
    return next((reason for stands, reason in obstacles if stands), "")


@dataclass(frozen=True, slots=True)
class _Unhashed:
    """A block whose content is to be loaded, as vLLM's scheduler half looks at one."""

    block_id: int
    is_null: bool
    block_hash: None = None


@dataclass(frozen=True, slots=True)
class _Load:
    """A load within the step: whose it is, and the hash of the first block it fills.

    The request's blocks are noted here: one that is aborted while its step runs has none any
    more when its load is found to have failed, and vLLM's cache has them all the same.
    """

    status: Any
    blocks: Sequence[int]
    first_block: int
    first_hash: bytes


def _covers_media(request: Request, tokens: int) -> bool:
    """Return whether an image or another medium lies within the first tokens of a request.

    vLLM does not send such a medium to its workers when it schedules what comes behind. If the
    load within that step fails, they have nothing to compute it from, and the engine ends.
    """
    places = (medium.mm_position for medium in request.mm_features or ())
    return any(place.offset + place.length <= tokens for place in places)


class InStepLoads:
    """The loads of the current step that vLLM's half plans and the forward pass carries out.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``, with one group of full attention.
        manager: What the half asks.
    """

    def __init__(self, half: Any, manager: KVTierManager) -> None:  # noqa: ANN401 - vLLM's
        self._half = half
        self._manager = manager
        (self._group,) = half.config.kv_group_configs
        self._hashes_per_block = self._group.tokens_per_block // half.config.tokens_per_hash
        self._offered: set[str] = set()
        self._loads: dict[int, _Load] = {}

    def fills_blocks_of(self, request: Request, local_tokens: int) -> bool:
        """Return whether blocks that ``request`` would share are being loaded.

        Args:
            request: A request that waits.
            local_tokens: What vLLM's own prefix cache has of it.
        """
        blocks = local_tokens // self._group.tokens_per_block
        return any(
            load.first_block < blocks
            and self._hash_of(request, load.first_block) == load.first_hash
            for load in self._loads.values()
        )

    def offer(self, request: Request, local_tokens: int, hit_tokens: int) -> int:
        """Return how many of ``hit_tokens`` to load within the step; 0 to load them ahead.

        An offer holds until the step is scheduled.

        Args:
            request: Who asks.
            local_tokens: What vLLM's own prefix cache has of it.
            hit_tokens: What can be loaded behind that.
        """
        status = self._half._req_status[request.request_id]  # noqa: SLF001
        tokens = hit_tokens
        if local_tokens + hit_tokens >= request.num_tokens:
            tokens -= self._group.tokens_per_block
        chunk = self._group.tokens_per_chunk
        if tokens <= 0 or status.partial_tail_boundary is not None:
            return 0
        if _covers_media(request, local_tokens + tokens):
            return 0
        keys = status.group_states[0].offload_keys
        wanted = keys[local_tokens // chunk : -(-(local_tokens + tokens) // chunk)]
        if not self._manager.in_ram(wanted, status.req_context):
            return 0
        self._offered.add(request.request_id)
        return tokens

    def take(self, request: Request, blocks: KVCacheBlocks) -> KVCacheBlocks | None:
        """Return the blocks to be loaded as vLLM's half must see them; None to load ahead."""
        if request.request_id not in self._offered:
            return None
        self._offered.discard(request.request_id)
        self._manager.load_in_step(request.request_id)
        first = self._first_block(request)
        (own,) = blocks.blocks
        fresh = [_Unhashed(block.block_id, block.is_null) for block in own[first:]]
        return KVCacheBlocks(([*own[:first], *fresh],))

    def planned(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Note the load that vLLM's half just planned for ``request``, which has ``blocks``."""
        status = self._half._req_status[request.request_id]  # noqa: SLF001
        first = self._first_block(request)
        (job_id,) = status.transfer_jobs
        own = [block.block_id for block in blocks.blocks[0]]
        self._loads[job_id] = _Load(status, own, first, self._hash_of(request, first))

    def end_offers(self) -> None:
        """Forget what was offered in this step and not taken: its request got no blocks."""
        self._offered.clear()

    def hide(self) -> None:
        """Keep vLLM's half from seeing the loads while it looks for what to store."""
        self.forget_ended()
        for job_id, load in self._loads.items():
            load.status.transfer_jobs.discard(job_id)

    def show(self) -> None:
        """Let vLLM's half see the loads again."""
        for job_id, load in self._loads.items():
            load.status.transfer_jobs.add(job_id)

    def unhash(self, invalid: Iterable[int], kv_cache_manager: KVCacheManager) -> None:
        """Take the hashes off the blocks that hold nothing right after a load that failed.

        Those are the invalid ones, and all behind them of the requests that have them, or had
        them until they were aborted. Of an aborted one nothing more is stored: vLLM's half
        would do so in the next step, from these blocks.
        """
        wrong: set[int] = set()
        bad = set(invalid)
        for load in self._loads.values():
            own = load.blocks
            first = next((at for at, block in enumerate(own) if block in bad), len(own))
            wrong.update(own[first:])
            if first < len(own) and load.status.req.is_finished():
                for group in load.status.group_states:
                    group.next_stored_chunk_idx = len(group.offload_keys)
        if wrong:
            kv_cache_manager.evict_blocks(wrong)

    def forget_ended(self) -> None:
        """Forget the loads that vLLM's half does not count any more."""
        if self._loads:
            jobs = self._half._jobs  # noqa: SLF001
            self._loads = {job: load for job, load in self._loads.items() if job in jobs}

    def _first_block(self, request: Request) -> int:
        status = self._half._req_status[request.request_id]  # noqa: SLF001
        return int(status.num_locally_computed_tokens // self._group.tokens_per_block)

    def _hash_of(self, request: Request, block: int) -> bytes:
        # The hash of a block is that of its end.
        found: bytes = request.block_hashes[(block + 1) * self._hashes_per_block - 1]
        return found
