"""Late stores: nothing from blocks that a request lost before it ended.

With windows, where groups have chunks of different lengths, vLLM's half offers some chunks that
it had passed over when it knows where the request ended. Their blocks it looked at when it
passed them, and not again: windows may have left them behind since, and others have got them.
So blocks that the request does not hold when it ends, and those that are given away before the
half offers, are struck out.

Since 0.30, and only as :func:`kvtier.vllm.compat.offers_late` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtier.errors import UnsupportedError
from kvtier.vllm.corrections.given_blocks import given_blocks

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

__all__ = ["LateStores", "late_stores_refused"]


def late_stores_refused(*, otherwise: str = "") -> UnsupportedError:
    """Return what to raise where late stores are to be expected and are not corrected.

    Args:
        otherwise: What else than another configuration of vLLM helps.
    """
    return UnsupportedError(
        "prefix_cache_retention_interval is None, and this model's sliding windows have "
        "shorter blocks than the rest: when a request ends, vLLM's half would store chunks "
        "from blocks that another request may have got; start vLLM with "
        f"--prefix-cache-retention-interval 0, its default{otherwise}"
    )


class LateStores:
    """Strikes out blocks of requests that end, in one scheduler half.

    Args:
        half: vLLM's ``OffloadingConnectorScheduler``.
        knows_tables: Whether its block tables are where they are looked for; if not, nothing
            is struck out.

    Attributes:
        ending: What the half knows of the requests that ended since the last step.
    """

    def __init__(
        self,
        half: Any,  # noqa: ANN401 - vLLM's
        *,
        knows_tables: bool,
    ) -> None:
        self._half = half
        self._windows: list[tuple[int, int]] = []
        """Of each group with a window, its place in the half's lists and its own index."""
        if knows_tables:
            self._windows = [
                (place, group.group_idx)
                for place, group in enumerate(half.config.kv_group_configs)
                if group.sliding_window_size_in_chunks is not None
            ]
        self.ending: list[Any] = []

    def strike_out_lost(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Let the half offer nothing late from blocks that a request lost before it ended.

        Args:
            request: The request, which ends.
            block_ids: What it holds, per KV cache group.
        """
        status = self._half._req_status.get(request.request_id) if self._windows else None  # noqa: SLF001
        if status is None:
            return
        self.ending.append(status)
        for place, group in self._windows:
            self._strike_out(status.group_states[place], block_ids[group])

    def strike_out_given(self, output: SchedulerOutput) -> None:
        """Let the half offer nothing late from blocks that a step gives to others.

        Args:
            output: The step, which the half has not seen yet.
        """
        ending, self.ending = self.ending, []
        given = given_blocks(self._half, output)
        for status in ending:
            for place, _ in self._windows:
                state = status.group_states[place]
                held = [0 if block in given else block for block in state.block_ids]
                self._strike_out(state, held)

    def _strike_out(self, state: Any, held: Sequence[int]) -> None:  # noqa: ANN401 - vLLM's
        """Strike out the blocks of chunks that were passed, but those that are ``held``."""
        table = state.block_ids
        passed = state.next_stored_chunk_idx * self._half.config.blocks_per_chunk
        for at, block in enumerate(table[:passed]):
            if at >= len(held) or held[at] != block:
                table[at] = 0
