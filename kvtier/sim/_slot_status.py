"""What workers in model time say about RAM slots."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.manager import LoadPlan
from kvtier.manager.plans import NO_SLOT
from kvtier.types import Job, Outcome, TransferResult

__all__ = ["ReliableSlotStatus"]


class ReliableSlotStatus:
    """Workers that are instant, and fail to load only what did not come up."""

    def __init__(self) -> None:
        self._lost: set[tuple[int, int]] = set()

    def note(self, job: Job, result: TransferResult) -> None:
        """Note which chunks of ``job``, which was to bring them up, are not in their slots."""
        if result.outcomes.count(Outcome.DONE) == len(result.outcomes):
            return
        places = zip(job.destination_slots, job.payload, result.outcomes, strict=True)
        self._lost.update(
            (slot, generation)
            for slot, generation, outcome in places
            if outcome is not Outcome.DONE
        )

    def lead(self, plan: LoadPlan) -> int:
        """Return how many chunks of ``plan`` were loaded before the first that was not."""
        if not self._lost and NO_SLOT not in plan.slots:
            return len(plan.slots)
        came = self.loaded(plan.slots, plan.generations)
        for at, (slot, ok) in enumerate(zip(plan.slots, came, strict=True)):
            if slot == NO_SLOT or not ok:
                return at
        return len(came)

    def issue(self, slots: Sequence[int]) -> None:
        """Nothing to note: the job is over."""

    def withdraw(self, slots: Sequence[int]) -> None:
        """Nothing to note: nobody reads the stamps."""

    def stored(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:  # noqa: ARG002 - of any
        """Return that all bytes are whole."""
        return [True] * len(slots)

    def loaded(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        """Return for each slot whether its bytes had come up."""
        if not self._lost:
            return [True] * len(slots)
        return [place not in self._lost for place in zip(slots, generations, strict=True)]

    def forgive(self, slots: Sequence[int]) -> None:
        """Forget what of ``slots`` had not come up."""
        self._lost = {place for place in self._lost if place[0] not in slots}

    def quiet(self, slots: Sequence[int]) -> list[bool]:
        """Return that no worker is busy."""
        return [True] * len(slots)
