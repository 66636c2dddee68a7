"""A manager that says what it is asked, and what it answers.

It is the manager itself with a word before or after each call that changes anything, so an
engine that records decides as one that does not, and one that does not pays nothing.
What the workers said is an input like the calls: it is noted with the call that asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from typing_extensions import override

from kvtier.keys import ChunkKey
from kvtier.manager import (
    NO_TERMS,
    LoadPlan,
    LoadWorth,
    Lookup,
    ManagerLimits,
    RequestTerms,
    SlotTruth,
    StorePlan,
    TieredOffloadingManager,
    TierState,
)
from kvtier.policies import Placement
from kvtier.recording._calls import LETTERS
from kvtier.types import Job, TransferResult

__all__ = ["Note", "RecordingManager"]

Note: TypeAlias = "Callable[[str, Mapping[str, Any]], None]"
"""Told a call's name, and its arguments and answers by name."""


class _Witness:
    """Passes questions to the workers' record and remembers its answers."""

    def __init__(self, truth: SlotTruth) -> None:
        self._truth = truth
        self._said: list[str] = []
        self._doubt = False
        self.issue = truth.issue
        self.withdraw = truth.withdraw

    def stored(self, slots: Sequence[int], generations: Sequence[int]) -> Sequence[bool]:
        return self._remember(self._truth.stored(slots, generations))

    def loaded(self, slots: Sequence[int], generations: Sequence[int]) -> Sequence[bool]:
        return self._remember(self._truth.loaded(slots, generations))

    def quiet(self, slots: Sequence[int]) -> Sequence[bool]:
        return self._remember(self._truth.quiet(slots))

    def take(self) -> dict[str, list[str]]:
        """Return what was said since the last call; nothing if it was always yes."""
        said, self._said = self._said, []
        doubt, self._doubt = self._doubt, False
        return {"said": said} if doubt else {}

    def _remember(self, answers: Sequence[bool]) -> Sequence[bool]:
        self._said.append("".join("1" if answer else "0" for answer in answers))
        self._doubt = self._doubt or not all(answers)
        return answers


class RecordingManager(TieredOffloadingManager):
    """A :class:`TieredOffloadingManager` that notes every call that changes its state.

    Args:
        tiers: The tiers, fastest first; index 0 is RAM.
        placement: Decides what crosses tiers.
        limits: Bounds to keep to.
        truth: What the workers say about RAM slots.
        record_events: Whether :meth:`take_events` has anything to return.
        follow_reuse: Whether :meth:`take_reuse_gaps` has.
        worth: Says which loads are worth their time; all of them when omitted.
        counting_group: Index of the KV cache group whose chunks stand for tokens.
        note: Told each call; it must not raise and must not change what it is given.
    """

    def __init__(  # noqa: PLR0913 - the manager's own, and one more
        self,
        tiers: Sequence[TierState],
        *,
        placement: Placement,
        limits: ManagerLimits,
        truth: SlotTruth,
        record_events: bool = False,
        follow_reuse: bool = True,
        worth: LoadWorth | None = None,
        counting_group: int = 0,
        note: Note,
    ) -> None:
        self._witness = _Witness(truth)
        super().__init__(
            tiers,
            placement=placement,
            limits=limits,
            truth=self._witness,
            record_events=record_events,
            follow_reuse=follow_reuse,
            worth=worth,
            counting_group=counting_group,
        )
        self._note = note
        self._quiet = False
        # Lookups come one by one and are noted request by request.
        self._looking = ""
        self._looked: list[ChunkKey] = []
        self._found: list[Lookup] = []

    @override
    def begin_request(self, req_id: str, terms: RequestTerms = NO_TERMS) -> None:
        super().begin_request(req_id, terms)
        given = {} if terms == NO_TERMS else {"terms": terms}
        self._tell("begin_request", request=req_id, **given)

    @override
    def end_request(self, req_id: str) -> None:
        super().end_request(req_id)
        self._tell("end_request", request=req_id)

    @override
    def lookup(self, key: ChunkKey, req_id: str) -> Lookup:
        if req_id != self._looking:
            self._tell_lookups()
            self._looking = req_id
        answer = super().lookup(key, req_id)
        self._looked.append(key)
        self._found.append(answer)
        return answer

    @override
    def lookup_prefix(self, keys: Sequence[ChunkKey], req_id: str) -> int | None:
        # One by one, for each answer is noted.
        hits = 0
        deferred = False
        for key in keys:
            answer = self.lookup(key, req_id)
            if answer is Lookup.MISS:
                break
            deferred = deferred or answer is not Lookup.HIT
            hits += 1
        return None if deferred else hits

    @override
    def prepare_load(self, keys: Sequence[ChunkKey], req_id: str) -> LoadPlan:
        plan = super().prepare_load(keys, req_id)
        self._tell(
            "prepare_load",
            request=req_id,
            keys=list(keys),
            slots=list(plan.slots),
            origins=list(plan.origins),
        )
        return plan

    @override
    def complete_load(self, req_id: str) -> None:
        super().complete_load(req_id)
        self._tell("complete_load", request=req_id)

    @override
    def prepare_store(self, keys: Sequence[ChunkKey], req_id: str) -> StorePlan | None:
        plan = super().prepare_store(keys, req_id)
        answers: dict[str, Any] = {}
        if plan is not None:
            answers = {
                "stored": list(plan.keys),
                "slots": list(plan.slots),
                "evicted": list(plan.evicted),
            }
        self._tell("prepare_store", request=req_id, keys=list(keys), **answers)
        return plan

    @override
    def complete_store(self, keys: Collection[ChunkKey]) -> None:
        # A set's order is its own, and the order slots are freed in decides who gets them.
        ordered = list(keys)
        super().complete_store(ordered)
        self._tell("complete_store", keys=ordered)

    @override
    def retain(self, keys: Iterable[ChunkKey], until: float) -> int:
        ordered = list(keys)
        kept = super().retain(ordered, until)
        self._tell("retain", keys=ordered, until=until, kept=kept)
        return kept

    @override
    def end_step(
        self, *, started: Iterable[str] = (), preempted: Iterable[str] = (), now: float = 0.0
    ) -> None:
        begun, stopped = list(started), list(preempted)
        super().end_step(started=begun, preempted=stopped, now=now)
        self._tell("end_step", started=begun, preempted=stopped, now=now)

    @override
    def give_up(self, req_id: str) -> None:
        super().give_up(req_id)
        self._tell("give_up", request=req_id)

    @override
    def set_out_of_service(self, tiers: Collection[int]) -> None:
        super().set_out_of_service(tiers)
        self._tell("set_out_of_service", tiers=sorted(tiers))

    @override
    def take_jobs(self) -> list[Job]:
        jobs = super().take_jobs()
        if jobs:
            self._tell("take_jobs", jobs=jobs)
        return jobs

    @override
    def apply(self, result: TransferResult) -> None:
        super().apply(result)
        self._tell("apply", result=result)

    @override
    def computed(self, tokens: int, seconds: float) -> None:
        super().computed(tokens, seconds)
        self._tell("computed", tokens=tokens, seconds=seconds)

    @override
    def flush(self) -> None:
        super().flush()
        self._tell("flush")

    @override
    def recover(self, tier: int, chunks: Iterable[tuple[ChunkKey, int]]) -> int:
        found = list(chunks)
        count = super().recover(tier, found)
        keys, slots = [key for key, _ in found], [slot for _, slot in found]
        self._tell("recover", tier=tier, keys=keys, slots=slots)
        return count

    @override
    def reset(self) -> None:
        # It calls itself for the jobs nobody took yet; those are no calls of the engine.
        self._tell_lookups()
        self._quiet = True
        try:
            super().reset()
        finally:
            self._quiet = False
        self._tell("reset")

    def _tell(self, name: str, **values: Any) -> None:  # noqa: ANN401 - what is told varies
        if self._quiet:
            return
        self._tell_lookups()
        self._note(name, values | self._witness.take())

    def _tell_lookups(self) -> None:
        if not self._looked:
            return
        answers = "".join(map(LETTERS.__getitem__, self._found))
        values = {"request": self._looking, "keys": self._looked, "answers": answers}
        self._looking, self._looked, self._found = "", [], []
        self._note("lookup", values)
