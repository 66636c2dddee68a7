"""Chooses the prompts to compute: those that are not stored yet and that fit into the tiers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.coverage import Coverage, Prompt, PromptCoverage, Stores
from kvtier.errors import ConfigError
from kvtier.warmup._events import Planned

__all__ = ["Work", "cover", "plan_prompts"]


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt to compute.

    Attributes:
        prompt: The prompt.
        chunks: Number of chunks that the prompt adds.
        tokens: Estimated number of tokens that the prompt adds.
    """

    prompt: Prompt
    chunks: int
    tokens: int


def plan_prompts(
    prompts: Sequence[Prompt], stores: Stores, planned: Planned, *, budget_bytes: int | None
) -> list[Work]:
    """Choose the prompts that one engine computes.

    The prompts' stored chunks count against the capacity too, because they must stay stored.

    Args:
        prompts: The prompts, in the order in which to compute them.
        stores: The engine's namespaces.
        planned: The sums to which this call adds the chosen prompts.
        budget_bytes: Number of bytes that may be written to each tier; None for no limit.

    Raises:
        ConfigError: There is a budget, but the size of a chunk is unknown.
    """
    reader, choice = stores.reader(), _Choice(planned, stores.capacity_chunks)
    if budget_bytes is not None:
        if not stores.slot_nbytes:
            problem = "the size of a chunk is unknown before an engine of this machine starts"
            raise ConfigError(f"--budget: {problem}; leave it out, or leave out --dry-run")
        choice.budget_chunks = budget_bytes // stores.slot_nbytes
    for prompt in prompts:
        choice.add(prompt, reader.cover(prompt))
    planned.prompts += len(choice.work)
    planned.tokens += sum(each.tokens for each in choice.work)
    if not stores.slot_nbytes:
        planned.nbytes = None
    elif planned.nbytes is not None:
        planned.nbytes += sum(each.chunks for each in choice.work) * stores.slot_nbytes
    return choice.work


@dataclass(slots=True)
class _Choice:
    """The chosen prompts, and the remaining capacity and budget.

    Attributes:
        planned: The sums over the prompts so far.
        capacity_chunks: Number of chunks that a tier can hold.
        budget_chunks: Number of chunks that may still be written to a tier.
        wanted: Key hashes of all chunks that must be stored at the end.
        work: The prompts to compute.
    """

    planned: Planned
    capacity_chunks: float
    budget_chunks: float = math.inf
    wanted: set[int] = field(default_factory=set)
    work: list[Work] = field(default_factory=list)

    def add(self, prompt: Prompt, found: PromptCoverage) -> None:
        """Add ``prompt`` to the chosen prompts, unless it is stored or does not fit."""
        planned = self.planned
        planned.before.add(found)
        hashes = found.key_hashes.tolist()
        added = set(hashes) - self.wanted
        missing = zip(hashes, found.is_missing.tolist(), strict=True)
        new = sum(is_new and key in added for key, is_new in missing)
        if not hashes:
            planned.short += 1
            return
        if len(self.wanted) + len(added) > self.capacity_chunks or new > self.budget_chunks:
            planned.left_out += not found.is_stored
            return
        self.wanted |= added
        if found.is_stored:
            planned.stored += 1
        elif not new and found.is_missing.any():
            planned.shared += 1
        else:
            self.budget_chunks -= new
            self.work.append(Work(prompt, new, _new_tokens(found, new)))


def _new_tokens(found: PromptCoverage, new_chunks: int) -> int:
    """Estimate the number of tokens to compute for ``new_chunks`` chunks of a prompt."""
    whole = found.tokens - found.tail_tokens
    return whole * new_chunks // len(found.key_hashes) + found.tail_tokens


def cover(prompts: Sequence[Prompt], stores: Stores, total: Coverage) -> dict[int, int]:
    """Add the coverage of ``prompts`` to ``total``.

    Returns:
        The rank of each chunk of the prompts, by the hash of the chunk's key.
    """
    reader, ranks = stores.reader(), dict[int, int]()
    for prompt in prompts:
        found = reader.cover(prompt)
        total.add(found)
        for key_hash in found.key_hashes.tolist():
            ranks.setdefault(key_hash, len(ranks))
    return ranks
