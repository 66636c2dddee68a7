"""What a start would find in a store, for a command that runs without an engine.

The plan is that of the start (:mod:`kvtier.tiers.slab.start_plan`). Nothing here writes into
the store, and an engine that starts meanwhile waits for a moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier.config import NvmeTierConfig, Remark
from kvtier.errors import ConfigError
from kvtier.tiers.slab.budget import describe_neighbour, unix_time_s, unreadable_neighbours
from kvtier.tiers.slab.direct_io import BlockIo
from kvtier.tiers.slab.inspect import nothing_opened, present_holder
from kvtier.tiers.slab.lock import Patience, is_tool, passing_holder
from kvtier.tiers.slab.namespace import (
    INDEX,
    find_strangers_file,
    is_named_as_one,
    is_of_later_version,
    is_ours,
    nbytes_of,
    read_layout,
)
from kvtier.tiers.slab.start_plan import (
    Fields,
    Neighbour,
    Opening,
    State,
    describe_difference,
    plan_start,
    wanted_nbytes,
)

__all__ = ["StoreExamination", "examine_store"]

_PATIENCE: Final = Patience(timeout_s=0.5)


@dataclass(frozen=True, slots=True)
class StoreExamination:
    """What a start would find in a store.

    Attributes:
        refusals: Why it would not start.
        warnings: What it would log.
        notes: What another identity would cost.
        holders: Who has a namespace open, for people.
        free_nbytes: Free bytes of the file system; None where nobody counts.
        wanted_nbytes: Bytes that the slots and the index still need.
        index_nbytes: Those of them that the index needs.
        reclaimed_nbytes: Bytes of slots that the start would remove.
        own_nbytes: Bytes that the cache has already.
    """

    refusals: Sequence[Remark] = ()
    warnings: Sequence[Remark] = ()
    notes: Sequence[Remark] = ()
    holders: Sequence[str] = ()
    free_nbytes: int | None = None
    wanted_nbytes: int = 0
    index_nbytes: int = 0
    reclaimed_nbytes: int = 0
    own_nbytes: int = 0


def examine_store(
    options: NvmeTierConfig, identity: Fields, io: BlockIo | None = None
) -> StoreExamination:
    """Return what a start with ``options`` would find; blocks for half a second at most.

    Args:
        options: The tier's options.
        identity: The known part of the engine's identity. A namespace that agrees with it is
            taken for the engine's own, the one that was used last if there are several.
        io: Looks at the disk.

    Raises:
        ConfigError: The store cannot be looked at.
    """
    io = io or BlockIo()
    try:
        neighbours, unreadable = _look(options.path, io)
        strangers = list(_strangers(options.path, identity, io))
        own = _own(neighbours, identity)
        others = [each for each in neighbours if each is not own]
        slots, opening = _opening(own, options, identity)
        plan = plan_start(opening, others, options)
        index_nbytes = nbytes_of(own.directory / INDEX) if own else 0
        place = options.path if options.path.exists() else options.path.parent
        free_nbytes = io.free_nbytes(place)
    except OSError as error:
        problem = f"{error.filename or options.path}: {error.strerror}"
        raise ConfigError(f"{problem}; run this as the user that runs the engine") from error
    slots_nbytes = own.slots_nbytes if own else 0
    wanted = wanted_nbytes(opening.nbytes, slots, slots_nbytes, index_nbytes)
    return StoreExamination(
        refusals=[*strangers, *_in_use(own, identity), *plan.refusals],
        warnings=[*unreadable, *_awaited([own, plan.awaited]), *plan.warnings],
        notes=list(_cost_of_change(own, opening, options)),
        holders=[each.holder for each in neighbours if each.holder],
        free_nbytes=free_nbytes,
        wanted_nbytes=wanted,
        index_nbytes=max(wanted - (opening.nbytes - slots_nbytes), 0),
        reclaimed_nbytes=plan.reclaimed_nbytes,
        own_nbytes=slots_nbytes + index_nbytes,
    )


def _look(root: Path, io: BlockIo) -> tuple[list[Neighbour], list[Remark]]:
    """Return the namespaces in ``root``, and what else takes room there."""
    if not root.is_dir():
        return [], []
    neighbours = list[Neighbour]()
    with nothing_opened(root, _PATIENCE):
        for directory in filter(is_named_as_one, root.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # somebody removes it meanwhile
                neighbours += _neighbour(directory, io)
    return neighbours, list(unreadable_neighbours(root, io))


def _neighbour(directory: Path, io: BlockIo) -> Iterator[Neighbour]:
    is_later = is_of_later_version(directory, io)
    if find_strangers_file(directory) or not (is_later or is_ours(directory, io)):
        return
    holder = present_holder(directory) or ""
    state = State.LATER if is_later else State.IDLE
    if holder:
        is_passing = passing_holder(directory) and not is_later
        state = State.PASSING if is_passing else State.ENGINE
    yield describe_neighbour(directory, state, io, holder=holder)


def _strangers(root: Path, identity: Fields, io: BlockIo) -> Iterator[Remark]:
    """Yield the namespaces that the engine would open if they were this user's."""
    for directory in filter(is_named_as_one, root.iterdir() if root.is_dir() else ()):
        layout = read_layout(directory, io)
        if layout is None or describe_difference(layout.fingerprint.fields, identity):
            continue
        if stranger := find_strangers_file(directory):
            remedy = "move it away or remove it to start with an empty cache"
            yield Remark("path", f"{directory} cannot be used: {stranger}", remedy)


def _own(neighbours: Sequence[Neighbour], identity: Fields) -> Neighbour | None:
    """Return the namespace that the engine would open; None for a new one."""
    agreeing = [
        each
        for each in neighbours
        if each.slots_nbytes and not describe_difference(each.fields, identity)
    ]
    return max(agreeing, key=lambda each: each.last_used_s, default=None)


def _opening(
    own: Neighbour | None, options: NvmeTierConfig, identity: Fields
) -> tuple[int, Opening]:
    """Return the slots, as far as they are known, and what would be opened."""
    slots, nbytes = 0, options.capacity_bytes
    if own is not None and own.slot_nbytes:
        slots = options.capacity_bytes // own.slot_nbytes
        nbytes = slots * own.slot_nbytes
    return slots, Opening(identity, nbytes, unix_time_s())


def _in_use(own: Neighbour | None, identity: Fields) -> Iterator[Remark]:
    if own is None or not own.holder:
        return
    problem = f"{own.directory} is in use by {own.holder}"
    if is_tool(own.holder):
        yield Remark("path", problem, "let it finish, or end it")
    elif own.state is State.ENGINE:
        hint = "" if "model" in identity else f"; if this is not model {own.model}, add --model"
        remedy = "one engine at a time may write a cache: stop it, or use another path"
        yield Remark("path", problem, remedy + hint)


def _awaited(neighbours: Iterable[Neighbour | None]) -> Iterator[Remark]:
    for each in neighbours:
        if each is not None and each.state is State.PASSING:
            problem = f"{each.directory} is in use by {each.holder}"
            yield Remark("path", problem, "a start waits for it, 10 seconds at most")


def _cost_of_change(
    own: Neighbour | None, opening: Opening, options: NvmeTierConfig
) -> Iterator[Remark]:
    """Say what an engine of another identity would do to the engine's own cache."""
    if own is None or own.state is not State.IDLE:
        return
    changed = plan_start(Opening({}, options.capacity_bytes, opening.now_s), [own], options)
    if changed.refusals or own in changed.leaving:
        does = "does not start" if changed.refusals else "removes it"
        yield Remark(
            "path",
            f"{own.describe(opening.now_s)} is found by an engine of the same identity; one "
            f"with another model or other settings {does}",
            "kvtier cache stat prints the identity as layout",
        )
