"""Where copies must go: what the placement policy answers, as far as it can be done.

Questions are asked for many copies at a time, because nearly always they are answered alike.
Nothing here changes a book: what follows from the answers is the caller's to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

from kvtier.manager.ladder import Ladder, first_whole
from kvtier.manager.run import Run
from kvtier.policies import ChunkCopy, CopyState
from kvtier.types import Purpose

__all__ = ["admitted", "long_enough", "places_of", "targets_of"]

_RESIDENT = CopyState.RESIDENT
_DEMOTE = Purpose.DEMOTE


def places_of(ladder: Ladder, run: Run) -> tuple[list[tuple[int, Run]], Sequence[ChunkCopy]]:
    """Say where copies in RAM must go soon that owe nothing yet.

    Returns:
        What goes to which tier, all of ``run`` being ``run`` itself, and what goes to none.
    """
    new = run.copies
    if ladder.holds_any(run.keys, slower_than=0):
        new = [copy for copy in new if first_whole(ladder.slower, copy.key) is None]
    staying = new
    going: list[tuple[int, Run]] = []
    for target, group in _placed(ladder, new).items():
        allowed = group
        if ladder.restricts_stores:
            allowed = [copy for copy in group if copy.terms.may_store_in(target)]
        entering = admitted(ladder, allowed, target)
        if len(entering) == len(new):
            staying = ()
        else:
            taken = set(entering)
            staying = [copy for copy in staying if copy not in taken]
        part = run if len(entering) == len(run.copies) else ladder.ram.run_of(entering)
        going.append((target, part))
    return going, staying


def admitted(ladder: Ladder, copies: Sequence[ChunkCopy], target: int) -> Sequence[ChunkCopy]:
    """Return those of ``copies`` that may enter tier ``target``."""
    answers = ladder.placement.admit_many(copies, target, _DEMOTE, ladder.ctx)
    return copies if all(answers) else list(compress(copies, answers))


def targets_of(
    ladder: Ladder, copies: Sequence[ChunkCopy], source: int, *, shortest: int = 1
) -> dict[int | None, Sequence[ChunkCopy]]:
    """Group ``copies``, which are in no slower tier, by the one each must reach.

    Args:
        ladder: The tiers.
        copies: Copies in one tier.
        source: Its index.
        shortest: Chunks of the shortest prefix whose clean copies go down; those that are
            dirty are owed, however short theirs is.

    Returns:
        The groups; under None what needs to reach no tier, or none that it may enter.
    """
    if not copies:
        return {}
    targets = ladder.placement.demote_many(copies, source, ladder.ctx)
    if shortest > 1:
        # One of too short a prefix never was to go down, or it would be dirty.
        targets = [
            target if copy.dirty or copy.depth + 1 >= shortest else None
            for copy, target in zip(copies, targets, strict=True)
        ]
    if not ladder.restricts_stores and targets.count(targets[0]) == len(copies):
        return {targets[0]: copies}
    groups: dict[int | None, list[ChunkCopy]] = {}
    for copy, target in zip(copies, targets, strict=True):
        place = target if copy.terms.may_store_in(target) else None
        groups.setdefault(place, []).append(copy)
    return dict(groups)


def long_enough(
    ladder: Ladder, copies: Iterable[ChunkCopy], shortest: int
) -> Iterator[ChunkCopy]:
    """Yield those of ``copies`` in RAM whose prefix has ``shortest`` chunks, worth going down.

    What comes before one that makes its prefix long enough is yielded with it.
    """
    for copy in copies:
        length = copy.depth + 1
        if length == shortest:
            # Now they are worth it; without them this one would be stranded below.
            yield from _before(ladder, copy)
        if length >= shortest:
            yield copy


def _before(ladder: Ladder, copy: ChunkCopy) -> list[ChunkCopy]:
    """Return the chunks before ``copy`` that RAM holds without a gap, root to leaf."""
    members = ladder.ram.copies
    before: list[ChunkCopy] = []
    while copy.depth and copy.parent is not None:
        parent = members.get(copy.parent)
        if parent is None or parent.state != _RESIDENT:
            break
        # It may have been stored anew since, behind another chunk.
        if parent.depth != copy.depth - 1:
            break
        before.append(parent)
        copy = parent
    before.reverse()
    return before


def _placed(ladder: Ladder, copies: Sequence[ChunkCopy]) -> dict[int, Sequence[ChunkCopy]]:
    """Return the slower tiers that must have some of ``copies`` soon, and which."""
    places = ladder.placement.place_many(copies, ladder.ctx)
    if places and places.count(places[0]) == len(places):
        return dict.fromkeys(places[0], copies)
    groups: dict[int, list[ChunkCopy]] = {}
    for copy, targets in zip(copies, places, strict=True):
        for target in targets:
            groups.setdefault(target, []).append(copy)
    return dict(groups)
