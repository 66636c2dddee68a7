"""Blocks that a step gives away, of which vLLM's half is not told.

The half ends the stores that read a block in the step that gives the block away. Of some it
does not hear then:

* **Blocks that others load into.** Where another connector loads a request's KV ahead, the half
  hears of its blocks only when the request is scheduled. Until then a store could go on that
  reads them. So it is told in the step that gives them away.
* **Blocks that are cleared for nobody.** With priorities a request may lose its blocks in the
  step that gave it some. These are cleared all the same, where a model needs that, and the half
  does not hear of them. So it is told.

In every release since 0.25, whose half keeps its tables under other names and is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput

__all__ = ["GivenBlocks", "block_copies", "given_blocks"]


class GivenBlocks:
    """Tells one scheduler half of blocks that a step gives away.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``, whose block tables are known.

    Attributes:
        noted: Blocks of requests that began in the step that is being scheduled, but for those
            that the half itself loads into.
    """

    def __init__(self, half: Any) -> None:  # noqa: ANN401 - vLLM's
        self._half = half
        self.noted: dict[str, KVCacheBlocks] = {}

    def tell(self, output: SchedulerOutput, cleared: Iterable[int]) -> None:
        """Tell the half of blocks whose requests are not scheduled, or are cleared.

        Args:
            output: The step, which the half has not seen yet.
            cleared: The blocks that it clears.
        """
        told = self._half._current_batch_allocated_block_ids  # noqa: SLF001
        noted, self.noted = self.noted, {}
        for req_id, blocks in noted.items():
            if req_id not in output.num_scheduled_tokens:
                told.update(
                    block.block_id
                    for block in chain.from_iterable(blocks.blocks)
                    if not block.is_null
                )
        told.update(cleared)


def given_blocks(half: Any, output: SchedulerOutput) -> set[int]:  # noqa: ANN401 - vLLM's
    """Return the blocks that a step gives to requests.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``, which has not seen the step yet.
        output: The step.
    """
    return {
        *getattr(half, "_current_batch_allocated_block_ids", ()),
        *_new_blocks(output),
        *(pair.dst_block_id for pair in block_copies(output)),
    }


def block_copies(output: SchedulerOutput) -> Iterable[Any]:
    """Return which blocks a step copies into others."""
    return getattr(output, "kv_cache_block_copies", None) or ()


def _new_blocks(output: SchedulerOutput) -> Iterator[int]:
    tables = chain(
        (new.block_ids for new in output.scheduled_new_reqs),
        filter(None, output.scheduled_cached_reqs.new_block_ids),
    )
    return chain.from_iterable(chain.from_iterable(tables))
