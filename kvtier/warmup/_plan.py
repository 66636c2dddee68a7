"""Chooses the prompts that a warm-up computes: those not stored yet, while there is room."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvtier.warmup._coverage import Coverage, CoverageReader, PromptCoverage, sum_coverages
from kvtier.warmup._events import Planned
from kvtier.warmup._prompts import Prompt

__all__ = ["Plan", "Room", "make_plan", "pick", "planned_of"]


@dataclass(frozen=True, slots=True)
class Room:
    """Limits on what a warm-up may store.

    Attributes:
        capacity_chunks: Number of chunks that a tier holds.
        budget_chunks: Number of chunks that the warm-up may write to a tier.
    """

    capacity_chunks: float = math.inf
    budget_chunks: float = math.inf


@dataclass(slots=True)
class Plan:
    """The prompts that a warm-up computes, in order.

    Attributes:
        before: The coverage of all prompts before the warm-up.
        ids: Ids of the prompts to compute, as in the :class:`PromptSpool`.
        chunks: For each of ``ids``, the number of chunks that the prompt adds.
        tokens: For each of ``ids``, the number of tokens that the prompt adds.
        stored: Number of prompts that are stored already.
        shared: Number of prompts whose chunks are all in other prompts of the file.
        short: Number of prompts shorter than one chunk, which no tier stores.
        left_out: Number of prompts without room in a tier or in the budget.
    """

    before: Coverage
    ids: array[int] = field(default_factory=lambda: array("q"))
    chunks: array[int] = field(default_factory=lambda: array("q"))
    tokens: array[int] = field(default_factory=lambda: array("q"))
    stored: int = 0
    shared: int = 0
    short: int = 0
    left_out: int = 0

    @property
    def new_chunks(self) -> int:
        """Return how many chunks will be stored."""
        return sum(self.chunks)

    @property
    def new_tokens(self) -> int:
        """Return how many tokens will be computed, if every shared prefix is computed once."""
        return sum(self.tokens)


def make_plan(
    prompts: Iterable[tuple[int, Prompt]], reader: CoverageReader, room: Room
) -> Plan:
    """Choose the prompts that a warm-up computes.

    Chunks that are stored already must stay stored, so they count against the capacity too.

    Args:
        prompts: Id and content of each prompt, in the order in which to compute them.
        reader: Looks up which chunks are stored.
        room: Limits on what the warm-up may store.
    """
    plan = Plan(reader.totals())
    wanted: set[int] = set()
    budget = room.budget_chunks
    for number, prompt in prompts:
        found = reader.cover(prompt)
        plan.before.add(found)
        hashes, missing = found.key_hashes.tolist(), found.is_missing.tolist()
        if not hashes:
            plan.short += 1
            continue
        added = set(hashes) - wanted
        new = sum(key in added for key, is_new in zip(hashes, missing, strict=True) if is_new)
        if len(wanted) + len(added) > room.capacity_chunks or new > budget:
            plan.left_out += not found.is_stored
            continue
        wanted |= added
        if found.is_stored:
            plan.stored += 1
        elif not new and found.is_missing.any():
            plan.shared += 1
        else:
            budget -= new
            plan.ids.append(number)
            plan.chunks.append(new)
            plan.tokens.append(_new_tokens(found, new))
    return plan


def _new_tokens(found: PromptCoverage, new_chunks: int) -> int:
    """Return how many tokens of a prompt are computed if it adds ``new_chunks`` chunks."""
    whole = found.tokens - found.tail_tokens
    return whole * new_chunks // len(found.key_hashes) + found.tail_tokens


def pick(plan: Plan, prompts: Iterator[Prompt]) -> Iterator[tuple[Prompt, int, int]]:
    """Yield each prompt of ``plan`` with the chunks and the tokens that it adds."""
    return zip(prompts, plan.chunks, plan.tokens, strict=True)


def planned_of(plans: Sequence[Plan], nbytes: int | None) -> Planned:
    """Return the event that tells of the plans of all engines.

    Args:
        plans: One for each engine.
        nbytes: Bytes to write to each tier, as in the event.
    """
    return Planned(
        prompts=sum(len(plan.ids) for plan in plans),
        tokens=sum(plan.new_tokens for plan in plans),
        nbytes=nbytes,
        stored=sum(plan.stored for plan in plans),
        shared=sum(plan.shared for plan in plans),
        short=sum(plan.short for plan in plans),
        left_out=sum(plan.left_out for plan in plans),
        before=sum_coverages([plan.before for plan in plans]),
    )
