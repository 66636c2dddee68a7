"""How many tokens of a waiting request can be loaded: groups that must agree on one length.

Every group alone has its own longest hit, but the request can start only at a length that all
of them can serve, and it must be the same for all. So the length only ever shrinks: full
attention groups cut it to their longest prefix, sliding windows to the rightmost run that
covers their window, and whoever looked before a later cut is asked again where that matters.
A prefix that was long enough stays long enough; a window must end where the length does, so
only windows are asked again, and a group whose answer was "later" because that answer may have
been about chunks beyond the cut. The length cannot shrink for ever, which ends the loop.

This runs for every waiting request at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from kvtier.connector.schedule.groups import ceil_div
from kvtier.connector.schedule.tracking import GroupTrack, TrackedRequest
from kvtier.keys import ChunkKey
from kvtier.manager import Lookup

__all__ = ["Matcher"]

_HIT, _MISS, _PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING


class Matcher:
    """Finds the longest load all groups agree on.

    Args:
        windows: Window of each group in chunks, 0 for full attention; in the groups' order.
        lookup: Says whether one chunk can be loaded for a request.
    """

    def __init__(
        self, windows: Sequence[int], lookup: Callable[[ChunkKey, str], Lookup]
    ) -> None:
        full = [number for number, window in enumerate(windows) if not window]
        sliding = [number for number, window in enumerate(windows) if window]
        sliding.sort(key=windows.__getitem__, reverse=True)
        self._sliding = tuple(sliding)
        self._all = (*full, *sliding)
        self._lookup = lookup

    def match(
        self,
        tracked: TrackedRequest,
        max_new_tokens: int | None,
        loading: AbstractSet[ChunkKey],
    ) -> int | None:
        """Return the tokens to load after the local ones; None to be asked again.

        Args:
            tracked: The request; its keys and local tokens are up to date.
            max_new_tokens: Most tokens to load, None for any.
            loading: Chunks that are being loaded for other requests. A request that hits one
                of them waits: the engine may share the blocks when they are there.
        """
        limit = self._limit(tracked, max_new_tokens)
        tokens = self._agree(tracked, limit)
        if tokens and loading and self._meets(tracked, tokens, loading):
            return None
        return tokens

    def _limit(self, tracked: TrackedRequest, max_new_tokens: int | None) -> int:
        """Return the longest end of a hit that would be of use."""
        local, end = tracked.local_tokens, tracked.request.num_tokens
        if max_new_tokens is not None:
            end = min(end, local + max_new_tokens)
        if tracked.load_limit is not None:
            end = min(end, local + tracked.load_limit)
        # The engine computes the last token anew, for its logits. A prefix can be cut by one
        # token afterwards, but a window that was matched at its end cannot.
        return end - 1 if self._sliding else end

    def _agree(self, tracked: TrackedRequest, end: int) -> int | None:
        local = tracked.local_tokens
        tokens = 0
        deferred = False
        groups = self._all
        while groups:
            again: tuple[int, ...] = ()
            slid = False
            for number in groups:
                group = tracked.groups[number]
                size = group.layout.tokens_per_chunk
                end = _within(group, end, whole=tracked.load_limit is not None)
                hit = self._hit(tracked, group, end) if end - local >= size else 0
                if hit is None:
                    deferred = True
                else:
                    end = min(end, hit)
                if end - local < size:
                    return 0
                shrunk = end - local < tokens
                if shrunk and deferred:
                    deferred = False
                    again = self._all
                elif shrunk and slid and not again:
                    again = self._sliding
                slid = slid or group.layout.window_chunks > 0
                tokens = end - local
            groups = again
        return None if deferred else tokens

    def _hit(self, tracked: TrackedRequest, group: GroupTrack, end: int) -> int | None:
        """Return where the hit of one group that ends by ``end`` ends; None for later."""
        layout = group.layout
        size = layout.tokens_per_chunk
        first = tracked.local_tokens // size
        keys = group.keys[first : ceil_div(end, size)]
        if layout.window_tokens is None:
            chunks = self._prefix(keys, tracked.req_id)
        else:
            chunks = self._window(
                keys, layout.window_chunks, layout.chunks_needed(end), tracked.req_id
            )
        if chunks is None:
            return None
        return (first + chunks) * size if chunks else 0

    def _prefix(self, keys: Sequence[ChunkKey], req_id: str) -> int | None:
        """Return how many leading keys are hits; None if one of them is on its way."""
        lookup = self._lookup
        hits = 0
        deferred = False
        for key in keys:
            answer = lookup(key, req_id)
            if answer is _HIT:
                hits += 1
            elif answer is _MISS:
                break
            else:
                deferred = True  # Go on: chunks behind this one are to be fetched as well.
        return None if deferred else hits

    def _window(
        self, keys: Sequence[ChunkKey], window: int, needed: int, req_id: str
    ) -> int | None:
        """Return where the last run of enough hits ends; None if one of them is on its way.

        A chunk that was found but must come up first is part of a run, so that none is asked
        for, and brought up, that the window does not need.

        Args:
            keys: Chunks that a hit may use.
            window: How long a run must be.
            needed: How long it must be if it ends with the last key.
            req_id: Who asks.
        """
        lookup = self._lookup
        deferred = pending = False
        run = 0
        for number in range(len(keys) - 1, -1, -1):
            answer = lookup(keys[number], req_id)
            if answer is _HIT or answer is _PENDING:
                pending = pending or answer is _PENDING
                run += 1
                if run == needed:
                    return None if deferred or pending else number + run
            else:
                deferred = deferred or answer is not _MISS
                pending = False  # It was of a run that is of no use.
                run = 0
                needed = window
        # A run that begins at the first key may be shorter: the engine has what is before it.
        return None if deferred or pending else run

    def _meets(
        self, tracked: TrackedRequest, tokens: int, loading: AbstractSet[ChunkKey]
    ) -> bool:
        """Return whether one of the chunks to load is being loaded already."""
        local = tracked.local_tokens
        for group in tracked.groups:
            size = group.layout.tokens_per_chunk
            keys = group.keys[local // size : ceil_div(local + tokens, size)]
            needed = group.layout.chunks_needed(local + tokens)
            if not loading.isdisjoint(keys[-needed:] if needed else keys):
                return True
        return False


def _within(group: GroupTrack, end: int, *, whole: bool) -> int:
    """Return the last end of a hit by ``end``: in the group's keys, perhaps of whole chunks."""
    size = group.layout.tokens_per_chunk
    end = min(end, len(group.keys) * size)
    return end - end % size if whole else end
