"""Reports the chunks of each request to the recorder and to the shadow policies.

The manager sees only chunks that the GPU's own cache lacks. The scheduler side knows all chunks
of a request. It knows the prompt's chunks when the request is first scheduled, and the answer's
chunks when the request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtier.config import KvtierConfig
from kvtier.connector.figures import ShadowPolicyFigures
from kvtier.connector.protocols import RequestContext
from kvtier.errors import UnsupportedError
from kvtier.keys import ChunkKey, group_filter
from kvtier.policies.shadow import ShadowTier
from kvtier.recording import Recorder, RequestLog

__all__ = ["Observer", "Positions", "build_observer"]

Positions = Callable[[RequestContext], Mapping[ChunkKey, int]]
"""Returns a request's chunks so far, root to leaf, each with its end in tokens."""


class Observer:
    """Reports each request, from arrival to end, to the recorder and the shadow policies.

    Args:
        recorder: Records the requests; None without a recorder.
        shadows: Shadow policies by their tier's name.
        positions: Returns the chunks of a request, each with its end in tokens.
        chunk_tokens: Number of tokens of a chunk of the counting group.
        counting_group: Index of the KV cache group whose chunks are recorded.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        shadows: Sequence[tuple[str, ShadowTier]],
        *,
        positions: Positions,
        chunk_tokens: int,
        counting_group: int = 0,
    ) -> None:
        self._log = (
            None
            if recorder is None
            else RequestLog(recorder.request, chunk_tokens=chunk_tokens)
        )
        self._shadows = shadows
        self._positions = positions
        self._chunk_tokens = chunk_tokens
        self._is_counted = group_filter(counting_group)
        self._open: dict[str, RequestContext] = {}
        self._waiting: dict[str, str] = {}
        """Sessions of requests that have not started."""

    def arrived(self, context: RequestContext, now: float, session: str = "") -> None:
        """Record a new request of ``session``; ``now`` is in seconds on a monotonic clock."""
        self._open[context.req_id] = context
        self._waiting[context.req_id] = session
        if self._log is not None:
            self._log.arrived(context.req_id, now, session)

    def started(self, req_ids: Iterable[str], now: float) -> None:
        """Record that requests were scheduled; only the first time of each request counts."""
        for req_id in req_ids:
            session = self._waiting.pop(req_id, None)
            if session is None:
                continue
            prompt = self._chunks(self._open[req_id])
            for _, tier in self._shadows:
                tier.serve(prompt, now, request=req_id, session=session)
            if self._log is not None:
                self._log.started(req_id, prompt)

    def ended(self, context: RequestContext) -> None:
        """Record that a request ended."""
        self._waiting.pop(context.req_id, None)
        known = self._open.pop(context.req_id, None)
        if known is not None and self._log is not None:
            self._log.ended(context.req_id, self._chunks(known))

    def reset(self) -> None:
        """Make every shadow policy forget its chunks, because the tiers were reset."""
        for _, tier in self._shadows:
            tier.clear()

    def close(self) -> None:
        """Record the ended requests that still wait for earlier requests."""
        if self._log is not None:
            self._log.close()

    def figures(self) -> list[ShadowPolicyFigures]:
        """Return the figures of the shadow policies."""
        return [
            ShadowPolicyFigures(
                tier=name,
                policy=policy,
                asked_chunks=tier.references,
                hit_chunks=hits,
                hit_ratio=hits / max(tier.references, 1),
            )
            for name, tier in self._shadows
            for policy, hits in tier.hits().items()
        ]

    def _chunks(self, context: RequestContext) -> list[ChunkKey]:
        """Return the complete chunks of a request in the counting group, first chunk first."""
        return [
            key
            for key, end in self._positions(context).items()
            if self._is_counted(key) and not end % self._chunk_tokens
        ]


def build_observer(
    config: KvtierConfig,
    recorder: Recorder | None,
    capacities: Sequence[int],
    *,
    positions: Positions | None,
    chunk_tokens: int,
    counting_group: int = 0,
) -> Observer | None:
    """Build the observer for ``config``; return None if there is nothing to observe.

    Args:
        config: The configuration.
        recorder: The recorder; None without a recorder.
        capacities: Number of slots of each tier.
        positions: Returns the chunks of a request; None if the entry point does not know them.
        chunk_tokens: Number of tokens of a chunk of the counting group.
        counting_group: Index of the KV cache group whose chunks are recorded.

    Raises:
        UnsupportedError: ``config`` asks for an observer but ``positions`` is None.
    """
    if recorder is None and not config.shadow:
        return None
    if positions is None:
        raise UnsupportedError(
            "trace.record and shadow need the chunks of each request, which an offloading "
            "spec does not have: remove these settings, or use KVTierConnector"
        )
    shadows = [
        (tier.name, ShadowTier(capacity, dict.fromkeys((tier.eviction, *config.shadow))))
        for tier, capacity in zip(config.tiers, capacities, strict=True)
        if config.shadow
    ]
    return Observer(
        recorder,
        shadows,
        positions=positions,
        chunk_tokens=chunk_tokens,
        counting_group=counting_group,
    )
