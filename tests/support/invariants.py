"""Invariants of a manager's state between two calls.

The check recounts everything that the manager counts incrementally, so it takes time in
proportion to the slots. It reads private members: the records of jobs, loads and requests that
it recounts are no part of the manager's interface, and a public view of them would be computed
from the same counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from kvtier.errors import KvtierError
from kvtier.manager import TieredOffloadingManager, TierState
from kvtier.policies import ChunkCopy, CopyState, Eviction
from kvtier.policies.eviction import Lru

__all__ = ["InvariantError", "check_manager", "eviction_order"]


class InvariantError(KvtierError):
    """The manager's state is inconsistent.

    Attributes:
        invariant: Name of the rule that is broken.
    """

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


def check_manager(manager: TieredOffloadingManager) -> None:
    """Recount everything that the manager counts.

    Args:
        manager: Any manager, between two calls of its methods.

    Raises:
        InvariantError: A rule is broken; the message names it and the evidence.
    """
    stack = manager._stack
    moving: Counter[ChunkCopy] = Counter()
    held: list[set[ChunkCopy]] = [set() for _ in stack.tiers]
    for record in manager._jobs.records():
        for index, copies in (
            (record.source, record.sources.copies),
            (record.destination, record.destinations),
        ):
            moving.update(copies)
            held[index].update(copies)
    held[0].update(manager._quarantine._held)
    loading = Counter(manager._loader.in_flight())
    held[0].update(loading)
    moving.update(loading)
    reading = Counter(manager._loader.reads())
    if stack.gds is not None:
        held[stack.gds.tier].update(reading)
    moving.update(reading)
    held[0].update(manager._demoter.waiting())
    stores = manager._storer._writes.values()
    begun = sum(
        any(copy.state == CopyState.WRITING for copy in each.listed.copies) for each in stores
    )
    _expect("stores in flight", "ram", counted=begun, recorded=len(stores))
    for tier in stack.tiers:
        _check_copies(tier, moving)
        _check_slots(tier, held[tier.index])
        _check_counters(tier)
        _check_order(tier)
        if "policy kvtier." in str(tier.policy_error):
            raise InvariantError("a policy picks a victim if it can", str(tier.policy_error))
    _check_grants(manager)
    _check_retained(manager)


def eviction_order(eviction: Eviction) -> list[ChunkCopy] | None:
    """Return the copies in eviction order, next victim first.

    Only for the built-in policies; None for others.
    """
    if not isinstance(eviction, Lru):
        return None
    return eviction.order()


def _expect(invariant: str, what: str, *, counted: int, recorded: int) -> None:
    if recorded != counted:
        raise InvariantError(
            invariant, f"{what}: recorded {recorded}, a recount gives {counted}"
        )
    if recorded < 0:
        raise InvariantError("nothing is negative", f"{what}: {recorded}")


def _check_slots(tier: TierState, held: Iterable[ChunkCopy]) -> None:
    """Check that every slot is a member, gone but held, or free, exactly once."""
    gone = [copy for copy in held if copy.state == CopyState.GONE and copy.pins]
    owners = Counter(_slots(tier, gone))
    for slot in range(tier.slots.capacity):
        if owners[slot] != 1:
            rule = "every slot has one owner"
            raise InvariantError(rule, f"slot {slot} of {tier.name} has {owners[slot]}")
    free = sum(end - start for start, end in tier.slots.extents())
    _expect(
        "free + used = capacity",
        f"free slots of {tier.name}",
        counted=free,
        recorded=tier.slots.free,
    )
    used = len(tier.copies) + len(gone)
    _expect(
        "free + used = capacity",
        f"slots of {tier.name}",
        counted=free + used,
        recorded=tier.slots.capacity,
    )


def _slots(tier: TierState, gone: Iterable[ChunkCopy]) -> Iterator[int]:
    for copy in (*tier.copies.values(), *gone):
        yield copy.slot
    for start, end in tier.slots.extents():
        yield from range(start, end)


def _check_counters(tier: TierState) -> None:
    copies = tier.copies.values()
    resident = [copy for copy in copies if copy.state == CopyState.RESIDENT]
    idle = sum(not copy.pins and not copy.dirty for copy in resident)
    dirty = sum(bool(copy.dirty) for copy in copies)
    for name, counted in (
        ("idle", idle),
        ("dirty", dirty),
        ("writing", len(tier.copies) - len(resident)),
    ):
        recorded = getattr(tier, name)
        _expect(f"{name} equals a recount", tier.name, counted=counted, recorded=recorded)


def _check_copies(tier: TierState, moving: Counter[ChunkCopy]) -> None:
    for key, copy in tier.copies.items():
        if copy.key != key or copy.state == CopyState.GONE:
            raise InvariantError("members are not gone", f"{copy} in {tier.name}")
        if min(copy.pins, copy.dirty, copy.grants) < 0:
            raise InvariantError("nothing is negative", f"{copy} in {tier.name}")
        # A member that is being written has its writer's pin, whatever it is written from.
        reasons = copy.grants + max(moving[copy], copy.state != CopyState.RESIDENT)
        if copy.pins < reasons:
            rule = "no copy is evictable and in a job"
            raise InvariantError(rule, f"{copy} in {tier.name} has {reasons} reasons to stay")


def _check_order(tier: TierState) -> None:
    """Check that every resident copy is in the eviction order or leaving, once."""
    for copy in tier.leaving:
        if tier.copies.get(copy.key) is not copy or not copy.dirty:
            raise InvariantError("who leaves is a dirty member", f"{copy} in {tier.name}")
    order = eviction_order(tier.eviction)
    if order is None:
        return
    resident = {
        copy
        for copy in tier.copies.values()
        if copy.state == CopyState.RESIDENT and copy not in tier.leaving
    }
    if len(order) != len(resident) or set(order) != resident:
        rule = "the eviction order holds what is resident and stays"
        raise InvariantError(rule, f"{tier.name}: {order} instead of {resident}")


def _check_retained(manager: TieredOffloadingManager) -> None:
    for tier, retention in zip(manager._stack.tiers, manager._stack.retentions, strict=True):
        for copy in retention._deadlines:
            if tier.copies.get(copy.key) is not copy or copy.state != CopyState.RESIDENT:
                raise InvariantError("what is retained is in its tier", repr(copy))
            if copy.pins <= copy.grants:
                raise InvariantError("what is retained is pinned", repr(copy))
        times = {(copy, until) for until, _, copy in retention._heap}
        if not times.issuperset(retention._deadlines.items()):
            raise InvariantError(
                "every deadline comes", f"{retention._deadlines}, {retention._heap}"
            )
    retained = len(manager._stack.retention)
    if retained > manager._stack.limits.retained:
        raise InvariantError("no more is retained than the quota", str(retained))


def _check_grants(manager: TieredOffloadingManager) -> None:
    ram = manager._stack.ram
    grants = manager._grants
    granted: Counter[ChunkCopy] = Counter()
    for request in manager._requests.values():
        granted.update(request.granted.keys())
        pending = sum(copy.state != CopyState.RESIDENT for copy in request.granted)
        _expect(
            "pending equals a recount",
            request.req_id,
            counted=pending,
            recorded=request.pending,
        )
    for copy in {*ram.copies.values(), *granted}:
        _expect(
            "grants equal a recount", repr(copy), counted=granted[copy], recorded=copy.grants
        )
        if copy.grants and ram.copies.get(copy.key) is not copy:
            raise InvariantError("what is granted is in RAM", repr(copy))
    _expect("granted equals a recount", ram.name, counted=len(granted), recorded=grants.granted)
    waiting = Counter(
        (id(copy), request.req_id)
        for copy, requests in grants._waiters.items()
        for request in requests
    )
    expected = Counter(
        (id(copy), request.req_id)
        for request in manager._requests.values()
        for copy in request.granted
        if copy.state != CopyState.RESIDENT
    )
    if waiting != expected:
        raise InvariantError("who waits is told", f"{waiting} instead of {expected}")
