"""Examine a cache for a command that runs without an engine.

The examination makes the same plan as a start (:mod:`kvtier.tiers.slab.start_plan`). This
module only reads the cache. An engine that starts during the examination waits for a moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from kvtier.config import NvmeTierConfig, Remark, TierConfig
from kvtier.errors import ConfigError
from kvtier.os.block_io import BlockIo
from kvtier.tiers.base import Fields, TierExamination
from kvtier.tiers.slab.index_reader import find_other_version
from kvtier.tiers.slab.inspect import (
    Found,
    StoredNamespace,
    find_directories,
    present_holder,
    root_locked,
)
from kvtier.tiers.slab.lock import Patience, is_tool
from kvtier.tiers.slab.namespace import INDEX, nbytes_of
from kvtier.tiers.slab.neighbours import Neighbour, State, describe, unusable
from kvtier.tiers.slab.start_plan import (
    Opening,
    describe_difference,
    plan_start,
    room_needed,
    slab_options,
)

__all__ = ["examine_slab"]

_PATIENCE: Final = Patience(timeout_s=0.5)


def examine_slab(options: TierConfig, identity: Fields) -> TierExamination:
    """Report what an engine with ``options`` would find at ``options.path`` at its start.

    This call blocks for half a second at most. Of the namespaces that match the known part of
    the engine's ``identity``, the most recently used one counts as the engine's own.

    Raises:
        ConfigError: The cache cannot be examined.
    """
    options = slab_options(options)
    io = BlockIo()
    try:
        found = find_directories(options.path, io) if options.path.is_dir() else []
        neighbours = _neighbours(options.path, found) if found else []
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
    grown_nbytes, added_nbytes = room_needed(opening.nbytes, slots, slots_nbytes, index_nbytes)
    return TierExamination(
        refusals=[
            *_foreign(found, identity),
            *_in_use(own, identity),
            *_other_version(own, options),
            *plan.refusals,
        ],
        warnings=[*unusable(found), *_awaited([own, plan.awaited]), *plan.warnings],
        notes=list(_cost_of_change(own, opening, options)),
        holders=[each.holder for each in neighbours if each.holder],
        free_nbytes=free_nbytes,
        wanted_nbytes=grown_nbytes + added_nbytes,
        index_nbytes=added_nbytes,
        reclaimed_nbytes=plan.reclaimed_nbytes,
        own_nbytes=slots_nbytes + index_nbytes,
    )


def _neighbours(root: Path, found: Sequence[Found]) -> list[Neighbour]:
    """Return the usable namespaces among ``found``."""
    neighbours = list[Neighbour]()
    with root_locked(root, _PATIENCE):
        for each in found:
            if each.is_namespace:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    is_locked = present_holder(each.directory) is not None
                    neighbours.append(describe(each, is_locked=is_locked))
    return neighbours


def _foreign(found: Sequence[Found], identity: Fields) -> Iterator[Remark]:
    """Yield a remark on each unusable namespace that matches ``identity``."""
    for each in found:
        if not each.problem or each.layout is None:
            continue
        if not describe_difference(each.layout.fingerprint.fields, identity):
            problem = f"{each.directory} cannot be used: {each.problem}"
            remedy = "move it away or remove it to start with an empty cache"
            yield Remark("path", problem, remedy)


def _own(neighbours: Sequence[Neighbour], identity: Fields) -> Neighbour | None:
    """Return the namespace that the engine would open; None if it would create one."""
    matching = [
        each
        for each in neighbours
        if each.slots_nbytes and not describe_difference(each.fields, identity)
    ]
    return max(matching, key=lambda each: each.last_used_s, default=None)


def _opening(
    own: Neighbour | None, options: NvmeTierConfig, identity: Fields
) -> tuple[int, Opening]:
    """Return the engine's number of slots (0 if unknown) and the namespace to open."""
    slots, nbytes = 0, options.capacity_bytes
    if own is not None and own.layout is not None:
        slots = options.capacity_bytes // own.layout.slot_nbytes
        nbytes = slots * own.layout.slot_nbytes
    return slots, Opening(identity, nbytes)


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


def _other_version(own: Neighbour | None, options: NvmeTierConfig) -> Iterator[Remark]:
    if own is None or own.layout is None or own.state is not State.IDLE:
        return
    if options.on_mismatch == "remove":
        return
    if problem := find_other_version(StoredNamespace(own.directory, own.layout)):
        remedy = "start the kvtier that wrote it, or set on_mismatch: remove"
        yield Remark("on_mismatch", problem, remedy)


def _awaited(neighbours: Iterable[Neighbour | None]) -> Iterator[Remark]:
    for each in neighbours:
        if each is not None and each.state is State.PASSING:
            problem = f"{each.directory} is in use by {each.holder}"
            yield Remark("path", problem, "a start waits for it, 10 seconds at most")


def _cost_of_change(
    own: Neighbour | None, opening: Opening, options: NvmeTierConfig
) -> Iterator[Remark]:
    """Yield a remark if an engine with another identity would remove ``own`` or not start."""
    if own is None or own.state is not State.IDLE:
        return
    changed = plan_start(Opening({}, options.capacity_bytes, opening.now_s), [own], options)
    if changed.refusals or own in changed.removed:
        does = "does not start" if changed.refusals else "removes it"
        yield Remark(
            "path",
            f"{own.describe(opening.now_s)} is found by an engine of the same identity; one "
            f"with another model or other settings {does}",
            "kvtier cache stat prints the identity as layout",
        )
