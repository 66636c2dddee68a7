"""Asks a shared tier which chunks of a request the tier has, while the request waits.

Other engines store chunks in a shared tier, and the tier's service evicts chunks. So the
manager does not know which chunks the tier has. At the first lookup of a request, the manager
asks for the keys that the other tiers lack, all in one *question*. The request waits until the
answer arrives or the question's deadline passes. Then lookups treat the found chunks like
chunks of any other slower tier. If a found chunk is missing when it is read, it is a miss.

A request asks at most one question. It asks no question if:

* the answer could not lengthen the hit,
* the tier lacked the first of the keys a moment ago,
* the cost model would compute the tokens anyway, or
* the tier is out of service.

A request without a positive answer reads no chunk from the tier.

The manager records the chunks found by a question in slots of the tier. So these chunks are not
written to the tier again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final, NamedTuple

from kvtier.keys import ChunkKey
from kvtier.manager.grants import RequestState, SharedAccess
from kvtier.manager.hits import HitRules, Prompt, Reach
from kvtier.manager.storage_jobs import StorageJobs
from kvtier.manager.tier import TierState
from kvtier.manager.tier_stack import TierStack
from kvtier.policies import ChunkCopy
from kvtier.types import JobId, Outcome, QuestionPart, TransferResult

__all__ = ["Questions"]

_ABSENT_S: Final = 1.0
"""Seconds to wait after a negative answer before a question asks for the missing key again."""
_MAX_ABSENT: Final = 1 << 14
_ANSWERS: Final = (Outcome.DONE, Outcome.MISSING)
_MAX_PRICED: Final = 256
"""Largest number of chunks that the cost model considers before a question. If the model would
load none of these chunks, it would load none of a longer hit."""


class _Part(NamedTuple):
    """The keys of one KV cache group in a question.

    Attributes:
        keys: Consecutive chunks.
        parent: The chunk before these chunks; None at the start of a prompt.
        depth: Number of chunks before these chunks.
        chunk_tokens: Tokens of a chunk.
        is_prefix: Whether a hit needs all of the group's chunks.
    """

    keys: Sequence[ChunkKey]
    parent: ChunkKey | None
    depth: int
    chunk_tokens: int
    is_prefix: bool

    @property
    def question(self) -> QuestionPart:
        """The description of these keys that the shared tier receives."""
        first_token = self.depth * self.chunk_tokens
        return QuestionPart(len(self.keys), first_token, self.chunk_tokens, self.is_prefix)


class _Question(NamedTuple):
    request: RequestState
    parts: Sequence[_Part]


class Questions:
    """Plans the questions to the shared tier and applies the answers.

    Args:
        stack: The tiers; the last one is the shared tier.
        jobs: Plans the jobs that carry the questions.
        rules: The chunks that a hit needs.
    """

    def __init__(self, stack: TierStack, jobs: StorageJobs, rules: HitRules) -> None:
        self._stack = stack
        self._jobs = jobs
        self._rules = rules
        self._pending: dict[JobId, _Question] = {}
        self._absent: OrderedDict[ChunkKey, float] = OrderedDict()

    def __bool__(self) -> bool:
        """Return whether a question has no answer yet."""
        return bool(self._pending)

    def ask(
        self,
        request: RequestState,
        prompt: Prompt,
        lead: Callable[[Sequence[ChunkKey]], int],
    ) -> bool:
        """Ask for the chunks that the other tiers lack; return whether the request must wait.

        Args:
            request: A request that has not asked yet.
            prompt: The chunks of the request's prompt.
            lead: Returns how many leading keys the other tiers have.
        """
        request.shared = SharedAccess.NONE
        tier = self._stack.shared
        allowed = request.terms.load_tiers
        if tier is None or tier.index in self._stack.out_of_service:
            return False
        if allowed is not None and tier.index not in allowed:
            return False
        parts = self._parts(prompt, lead)
        if not parts or not self._is_worthwhile(tier, parts):
            return False
        (first, *others) = parts
        keys = [*first.keys, *chain.from_iterable(part.keys for part in others)]
        job_id = self._jobs.plan_question(tier, keys, [part.question for part in parts])
        self._pending[job_id] = _Question(request, parts)
        request.shared = SharedAccess.ASKED
        return True

    def apply(self, result: TransferResult) -> bool:
        """Apply the answer to a question; return False if ``result`` is of another job."""
        question = self._pending.pop(result.job_id, None)
        if question is None:
            return False
        request, parts = question
        request.shared = SharedAccess.NONE
        if result.outcomes[0] not in _ANSWERS:  # a question fails as a whole
            return True
        at = 0
        for part in parts:
            end = at + len(part.keys)
            if self._remember(part, result.outcomes[at:end]):
                request.shared = SharedAccess.READABLE
            at = end
        return True

    def clear(self) -> None:
        """Forget all questions after a reset of the cache; their answers are ignored."""
        for question in self._pending.values():
            question.request.shared = SharedAccess.NONE
        self._pending.clear()
        self._absent.clear()

    def _parts(
        self, prompt: Prompt, lead: Callable[[Sequence[ChunkKey]], int]
    ) -> Sequence[_Part]:
        """Return the keys to ask for, by group; empty if they cannot lengthen the hit."""
        parts: list[_Part] = []
        now = self._stack.ctx.now
        for group, keys in zip(self._rules.groups, prompt.keys, strict=True):
            size, is_prefix = group.chunk_tokens, group.reach is Reach.PREFIX
            first, end = prompt.local_tokens // size, prompt.limit_tokens // size
            first += lead(keys[first:end])
            rest = keys[first:end]
            if is_prefix and rest and now - self._absent.get(rest[0], -_ABSENT_S) < _ABSENT_S:
                return ()
            if rest:
                parent = keys[first - 1] if first else None
                parts.append(_Part(rest, parent, first, size, is_prefix))
        return parts

    def _is_worthwhile(self, tier: TierState, parts: Sequence[_Part]) -> bool:
        """Return whether the cost model would load any of the chunks if the tier had them."""
        stack = self._stack
        chunks = sum(len(part.keys) for part in parts)
        counted = sum(len(part.keys) for part in parts if stack.is_counted(part.keys[0]))
        if not counted:
            return True  # only chunks of other groups are missing
        if chunks > _MAX_PRICED:
            counted = max(counted * _MAX_PRICED // chunks, 1)
            chunks = _MAX_PRICED
        sources = [tier.index] * chunks
        choice = stack.cost_model.choose(sources, counted=counted, now=stack.ctx.now)
        return choice is None or choice.kept > 0

    def _remember(self, part: _Part, outcomes: Sequence[Outcome]) -> bool:
        """Record which chunks of ``part`` the tier has; return whether the tier has any."""
        stack, tier = self._stack, self._stack.shared
        assert tier is not None
        keys: Sequence[ChunkKey] = part.keys
        if part.is_prefix and Outcome.MISSING in outcomes:
            # Chunks behind the first missing one are of no use, but may be remembered wrongly.
            end = list(outcomes).index(Outcome.MISSING)
            self._record_absent(keys[end])
            if not tier.copies or tier.copies.keys().isdisjoint(keys[end:]):
                keys, outcomes = keys[:end], outcomes[:end]
        found: list[int] = []
        for at, (key, outcome) in enumerate(zip(keys, outcomes, strict=True)):
            copy = tier.copies.get(key)
            if outcome is Outcome.MISSING:
                if copy is not None:
                    stack.drop_missing(tier, copy)
            elif copy is None:
                found.append(at)
        found = found[: tier.available]
        if found:
            slots, _ = stack.take_slots(tier, [keys[at] for at in found])
            copies = [
                ChunkCopy(keys[at], slot, keys[at - 1] if at else part.parent, part.depth + at)
                for at, slot in zip(found, slots, strict=True)
            ]
            tier.add_resident(copies[::-1], stack.ctx)  # a prompt is forgotten from its end
            stack.events.add(tier.index, [copy.key for copy in copies], removed=False)
        return Outcome.DONE in outcomes

    def _record_absent(self, key: ChunkKey) -> None:
        self._absent[key] = self._stack.ctx.now
        self._absent.move_to_end(key)
        if len(self._absent) > _MAX_ABSENT:
            self._absent.popitem(last=False)
