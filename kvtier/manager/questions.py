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
from itertools import chain, islice
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


class _Part(NamedTuple):
    """The keys of one KV cache group in a question.

    Attributes:
        keys: Consecutive chunks.
        parent: The chunk before these chunks; None at the start of a prompt.
        question: The description of these keys that the shared tier receives.
        is_head: Whether a hit needs all of the group's chunks, and no tier has the first one.
    """

    keys: Sequence[ChunkKey]
    parent: ChunkKey | None
    question: QuestionPart
    is_head: bool


class _Question(NamedTuple):
    """A question whose job is not settled yet.

    Attributes:
        request: The request that waits; None once the deadline has passed.
        parts: The keys.
    """

    request: RequestState | None
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
        keys = parts[0].keys
        if len(parts) > 1:
            keys = list(chain.from_iterable(part.keys for part in parts))
        job_id = self._jobs.plan_question(tier, keys, [part.question for part in parts])
        self._pending[job_id] = _Question(request, parts)
        request.shared = SharedAccess.ASKED
        return True

    def apply(self, result: TransferResult) -> bool:
        """Apply the answer to a question; return False if ``result`` belongs to another job.

        An answer after the deadline is remembered for later requests. The request of the
        question no longer waits, and reads nothing from the tier.
        """
        question = self._pending.pop(result.job_id, None)
        if question is None:
            return False
        request, parts = question
        if not result.settled:  # the deadline passed; the answer may still arrive
            self._pending[result.job_id] = question._replace(request=None)
        access = SharedAccess.NONE
        if result.outcomes[0] in _ANSWERS:  # a question fails as a whole
            access = self._remember_all(parts, result.outcomes)
        if request is not None:
            request.shared = access
        return True

    def clear(self) -> None:
        """Forget all questions after a reset of the cache; their answers are ignored."""
        for request, _ in self._pending.values():
            if request is not None:
                request.shared = SharedAccess.NONE
        self._pending.clear()
        self._absent.clear()

    def _parts(
        self, prompt: Prompt, lead: Callable[[Sequence[ChunkKey]], int]
    ) -> Sequence[_Part]:
        """Return the missing keys by group; empty if a question about them would be useless."""
        parts: list[_Part] = []
        now = self._stack.ctx.now
        for group, keys in zip(self._rules.groups, prompt.keys, strict=True):
            size, is_prefix = group.chunk_tokens, group.reach is Reach.PREFIX
            first = prompt.local_tokens // size
            rest = keys[first : prompt.limit_tokens // size]
            found = lead(rest)
            if found:
                first += found
                rest = rest[found:]
            if not rest:
                continue
            if is_prefix and now - self._absent.get(rest[0], -_ABSENT_S) < _ABSENT_S:
                return ()
            parent = keys[first - 1] if first else None
            question = QuestionPart(len(rest), first * size, size, is_prefix)
            parts.append(_Part(rest, parent, question, is_prefix and not found))
        return parts

    def _is_worthwhile(self, tier: TierState, parts: Sequence[_Part]) -> bool:
        """Return whether the cost model would load any of the chunks if the tier had them."""
        stack = self._stack
        chunks = counted = 0
        for part in parts:
            chunks += len(part.keys)
            if stack.is_counted(part.keys[0]):
                counted += len(part.keys)
        if not counted:
            return True  # only chunks of other groups are missing
        return stack.cost_model.would_load(
            tier.index, chunks, counted=counted, now=stack.ctx.now
        )

    def _remember_all(self, parts: Sequence[_Part], outcomes: Sequence[Outcome]) -> int:
        """Record which chunks the tier has; return the request's :class:`SharedAccess`.

        Without the first chunk of a prompt the others are of no use, and are not looked at.
        """
        at, is_found = 0, False
        for part in parts:
            end = at + len(part.keys)
            if part.is_head and outcomes[at] is Outcome.MISSING:
                self._record_end(part.keys, 0)
                return SharedAccess.NOWHERE
            is_found |= self._remember(part, outcomes[at:end])
            at = end
        return SharedAccess.READABLE if is_found else SharedAccess.NONE

    def _remember(self, part: _Part, outcomes: Sequence[Outcome]) -> bool:
        """Record which chunks of ``part`` the tier has; return whether the tier has any."""
        stack, tier = self._stack, self._stack.shared
        assert tier is not None
        keys: Sequence[ChunkKey] = part.keys
        depth = part.question.first_token // part.question.chunk_tokens
        if part.question.is_prefix and Outcome.MISSING in outcomes:
            end = list(outcomes).index(Outcome.MISSING)
            self._record_end(keys, end)
            keys, outcomes = keys[:end], outcomes[:end]
        found: list[int] = []
        for at, (key, outcome) in enumerate(zip(keys, outcomes, strict=True)):
            copy = tier.copies.get(key)
            if outcome is Outcome.MISSING:
                if copy is not None:
                    stack.drop_unreadable(tier, copy, Outcome.MISSING)
            elif copy is None:
                found.append(at)
        found = found[: tier.available]
        if found:
            slots, _ = stack.take_slots(tier, [keys[at] for at in found])
            copies = [
                ChunkCopy(keys[at], slot, keys[at - 1] if at else part.parent, depth + at)
                for at, slot in zip(found, slots, strict=True)
            ]
            tier.add_resident(copies[::-1], stack.ctx)  # a prompt is forgotten from its end
            stack.events.add(tier.index, [copy.key for copy in copies], removed=False)
        return Outcome.DONE in outcomes

    def _record_end(self, keys: Sequence[ChunkKey], end: int) -> None:
        """Record that the tier lacks ``keys[end]``, the first missing chunk of a prompt.

        The chunks behind it are of no use. The copies remembered there are dropped, so that the
        chunks are put again.
        """
        stack, tier = self._stack, self._stack.shared
        assert tier is not None
        for key in islice(keys, end, None):
            copy = tier.copies.get(key)
            if copy is None:  # a prompt is forgotten from its end, so nothing follows
                break
            stack.drop_unreadable(tier, copy, Outcome.MISSING)
        if keys[end] in tier.copies:
            return  # the chunk is being put
        absent = self._absent
        absent[keys[end]] = stack.ctx.now
        absent.move_to_end(keys[end])
        if len(absent) > _MAX_ABSENT:
            absent.popitem(last=False)
