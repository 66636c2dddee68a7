"""Tells the recording and the shadow policies what each request is made of.

The manager is asked for chunks piece by piece, and not for those that are in the GPU's own
cache. The whole of a request is in the positions that vLLM's scheduler half keeps in its
context: when the request is scheduled for the first time they are the whole chunks of its
prompt, and when it is over those of its answer as well.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence

from vllm.v1.kv_offload.base import ReqContext

from kvtier.config import KvtierConfig
from kvtier.errors import UnsupportedError
from kvtier.keys import ChunkKey, is_of_first_group
from kvtier.policies.shadow import ShadowTier
from kvtier.recording import Recorder, RequestLog
from kvtier.vllm.statistics import ShadowFigures

__all__ = ["Observer", "build_observer"]

_POSITIONS = "_offload_key_positions"
_positions_of = operator.attrgetter(_POSITIONS)


class Observer:
    """Follows requests from their arrival to their end; keeps nothing of them but keys.

    Args:
        recorder: Where requests are recorded, if anywhere.
        shadows: Ghosts by their tier's name.
        chunk_tokens: Tokens of a chunk of the first KV cache group.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        shadows: Sequence[tuple[str, ShadowTier]],
        *,
        chunk_tokens: int,
    ) -> None:
        self._log = (
            None
            if recorder is None
            else RequestLog(recorder.request, chunk_tokens=chunk_tokens)
        )
        self._shadows = shadows
        self._chunk_tokens = chunk_tokens
        self._open: dict[str, ReqContext] = {}

    def arrived(self, context: ReqContext, now: float) -> None:
        """Note a new request, ``now`` in seconds on a monotonic clock."""
        self._open[context.req_id] = context
        if self._log is not None:
            self._log.arrived(context.req_id, now)

    def started(self, req_ids: Iterable[str], now: float) -> None:
        """Note requests that were scheduled for the first time in this step."""
        for req_id in req_ids:
            context = self._open.get(req_id)
            if context is None:
                continue
            prompt = self._chunks(context)
            for _, tier in self._shadows:
                tier.serve(prompt, now)
            if self._log is not None:
                self._log.started(req_id, prompt)

    def ended(self, context: ReqContext) -> None:
        """Note that a request is over."""
        known = self._open.pop(context.req_id, None)
        if known is not None and self._log is not None:
            self._log.ended(context.req_id, self._chunks(known))

    def reset(self) -> None:
        """Note that every tier was emptied."""
        for _, tier in self._shadows:
            tier.clear()

    def close(self) -> None:
        """Record the requests that wait for earlier ones."""
        if self._log is not None:
            self._log.close()

    def figures(self) -> list[ShadowFigures]:
        """Return what the ghosts hit so far."""
        return [
            ShadowFigures(
                tier=name,
                policy=ghost.policy,
                asked_chunks=ghost.references,
                hit_chunks=ghost.hits,
            )
            for name, tier in self._shadows
            for ghost in tier.figures()
        ]

    def _chunks(self, context: ReqContext) -> list[ChunkKey]:
        """Return the whole chunks of the first KV cache group, root to leaf."""
        return [
            key
            for key, end in _positions_of(context).items()
            if is_of_first_group(key) and not end % self._chunk_tokens
        ]


def build_observer(
    config: KvtierConfig,
    recorder: Recorder | None,
    capacities: Sequence[int],
    *,
    chunk_tokens: int,
) -> Observer | None:
    """Build what ``config`` asks for; None if that is nothing.

    Args:
        config: The configuration.
        recorder: The recording, if there is one.
        capacities: Slots of each tier.
        chunk_tokens: Tokens of a chunk of the first KV cache group.

    Raises:
        UnsupportedError: This vLLM does not say what a request is made of.
    """
    if recorder is None and not config.shadow:
        return None
    if _POSITIONS not in {field.name for field in dataclasses.fields(ReqContext)}:
        raise UnsupportedError(
            "this vLLM does not tell an offloading manager which chunks a request has, which "
            "trace.record and shadow need; use vLLM 0.32, or leave them out"
        )
    shadows = [
        (tier.name, ShadowTier(capacity, dict.fromkeys((tier.eviction, *config.shadow))))
        for tier, capacity in zip(config.tiers, capacities, strict=True)
        if config.shadow
    ]
    return Observer(recorder, shadows, chunk_tokens=chunk_tokens)
