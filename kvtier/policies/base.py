"""The interfaces of policies, and the values that policies see.

An :class:`Eviction` orders the copies of *one* tier and picks victims. A cache has one
:class:`Placement`, which decides which chunks move between tiers. The caller of the policies is
the *driver*: the manager of a live engine, or a simulator. Policies do no I/O, do not await,
and get time and random numbers from a :class:`PolicyContext`. So a live engine and a simulator
use the same code, and a policy that was tuned on a trace is deployed unchanged.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Final, Literal

from kvtier.errors import KvtierError
from kvtier.keys import ChunkKey

__all__ = [
    "NO_TERMS",
    "ChunkCopy",
    "CopyState",
    "Evictable",
    "Eviction",
    "NoVictimError",
    "Placement",
    "PolicyContext",
    "Promotion",
    "RequestTerms",
    "is_evictable",
    "is_unpinned",
    "session_terms",
]


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """A client's limits for its request. Tiers are indices; 0 is RAM.

    Attributes:
        load_tiers: Tiers to load from; None for all tiers. Chunks in other tiers are misses.
        store_tiers: Tiers to store new chunks in; None for all tiers. RAM is always included,
            because chunks reach every other tier through RAM.
        session: The request's session, for policies; an empty string if unknown.
    """

    load_tiers: frozenset[int] | None = None
    store_tiers: frozenset[int] | None = None
    session: str = ""

    @property
    def stores_nothing(self) -> bool:
        """Whether the request forbids storing its new chunks."""
        return self.store_tiers is not None and not self.store_tiers

    def may_store_in(self, tier: int | None) -> bool:
        """Return whether new chunks may be stored in ``tier``, or in every tier for None."""
        return self.store_tiers is None or tier in self.store_tiers


NO_TERMS: Final = RequestTerms()


def session_terms(session: str) -> RequestTerms:
    """Return terms without limits for ``session``, which may be empty."""
    return RequestTerms(session=session) if session else NO_TERMS


class CopyState:
    """The states of a copy. They are plain integers, because integers compare fast."""

    WRITING: ClassVar[int] = 0
    """The bytes are arriving; requests may wait for them."""
    LATE: ClassVar[int] = 1
    """The bytes are arriving after their deadline; no request waits for them."""
    RESIDENT: ClassVar[int] = 2
    """All bytes are in the slot; a lookup finds the copy."""
    GONE: ClassVar[int] = 3
    """The copy has left the tier. A queue or a job may still refer to this object."""


_WRITING = CopyState.WRITING


class ChunkCopy:
    """The copy of one chunk in one tier.

    The driver sets the attributes, and policies read them. Only the eviction policy of the
    copy's tier sets :attr:`queued` and :attr:`policy`.

    Attributes:
        key: The chunk's key.
        slot: Number of the slot with the chunk's bytes.
        state: One of :class:`CopyState`.
        pins: Number of transfers and waiting requests that need the copy. A copy with pins
            cannot be evicted.
        dirty: Number of slower tiers that lack the chunk. They must receive the chunk before
            this copy may be evicted.
        hits: Number of loads of this copy, plus the number of started promotions of it.
        parent: Key of the preceding chunk of the prefix; None at the root or if unknown.
        depth: Number of chunks before this chunk in the prefix.
        terms: The terms of the request that stored the chunk.
        queued: An integer that the eviction policy may use freely, for example as a count.
        policy: An object that the eviction policy may use freely.
        grants: Number of waiting requests that keep the copy in RAM. :attr:`pins` includes this
            number.
        origin: For a RAM copy that was promoted and not loaded since, the index of the source
            tier; else 0.
        generation: Unique number of the write to RAM that filled the slot; 0 in a slower tier.
    """

    __slots__ = (
        "depth",
        "dirty",
        "generation",
        "grants",
        "hits",
        "key",
        "origin",
        "parent",
        "pins",
        "policy",
        "queued",
        "slot",
        "state",
        "terms",
    )

    def __init__(
        self,
        key: ChunkKey,
        slot: int,
        parent: ChunkKey | None = None,
        depth: int = 0,
        generation: int = 0,
    ) -> None:
        self.key = key
        self.slot = slot
        self.parent = parent
        self.depth = depth
        self.terms = NO_TERMS
        self.state = _WRITING
        self.pins = 0
        self.dirty = 0
        self.hits = 0
        self.queued = 0
        self.policy: Any = None
        self.grants = 0
        self.origin = 0
        self.generation = generation

    @property
    def session(self) -> str:
        """The session of the request that stored the chunk; an empty string if unknown."""
        return self.terms.session

    def __repr__(self) -> str:
        state = ("writing", "late", "resident", "gone")[self.state]
        return f"<ChunkCopy {self.key.hex()[:12]} slot={self.slot} {state} pins={self.pins}>"


@dataclass(slots=True)
class PolicyContext:
    """The time, the random numbers and the request of a call. All calls reuse one object.

    Attributes:
        now: Seconds on a monotonic clock. The driver updates this time once per step. An engine
            may skip the update if a step makes no decisions.
        rng: The only source of random numbers, seeded by the driver.
        request: Id of the request that the call serves; an empty string if there is none.
        session: The request's session; an empty string if unknown.
    """

    now: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    request: str = ""
    session: str = ""


class NoVictimError(KvtierError):
    """An eviction policy picked too few victims, or an object that is not a ChunkCopy."""

    def __init__(self, eviction: Eviction, picked: object = None) -> None:
        kind: type[object] = type(eviction)
        problem = "picks too few victims although more chunks may leave"
        if picked is not None:
            problem = f"picks {picked!r}, which is no ChunkCopy"
        name = f"{kind.__module__}:{kind.__qualname__}"
        super().__init__(f"eviction policy {name} {problem}; repair its pick")


Evictable = Callable[[ChunkCopy], bool]


def is_evictable(copy: ChunkCopy) -> bool:
    """Return whether a resident ``copy`` has no pins and is not dirty."""
    return not copy.pins and not copy.dirty


def is_unpinned(copy: ChunkCopy) -> bool:
    """Return whether ``copy`` has no pins. The copy may be dirty."""
    return not copy.pins


class Eviction(ABC):
    """Orders the copies of one tier and picks victims.

    For a resident chunk, the driver calls :meth:`on_hit`. For an absent chunk, the driver calls
    :meth:`on_miss` once, then :meth:`pick` until a slot is free, then :meth:`on_insert` if the
    bytes arrive. At any time, several chunks may be between ``on_miss`` and ``on_insert``.

    Every method takes O(1) amortised time, or O(log n) if copies have scores. A policy may keep
    keys of evicted chunks (ghosts), at most two per slot. A policy must drop every reference to
    a picked copy, because the driver may reuse the object for another chunk. The driver does
    not change ``queued`` and ``policy`` of a reused object.

    Args:
        capacity: Number of slots of the tier, at least 1. ``kvtier check`` builds each policy
            with 1 slot.

    Attributes:
        capacity: Number of slots of the tier.
        tracks_misses: Whether the class overrides :meth:`on_miss`. If False, the driver may
            skip calls of :meth:`on_miss`.
    """

    touch_order: ClassVar[Literal["reverse", "forward"]] = "reverse"
    """Order in which the manager reports the chunks that a request used or stored together.
    ``reverse`` is leaf to root, so the first chunks of a prefix stay longest. ``forward`` is
    root to leaf. Chunks of several KV cache groups are merged by depth."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tracks_misses = type(self).on_miss is not Eviction.on_miss

    def on_miss(self, key: ChunkKey, ctx: PolicyContext) -> None:  # noqa: B027 - a default that works
        """Record that a request missed ``key``, which is about to be inserted.

        The driver calls this method once for each insertion, before it frees a slot for the
        chunk.
        """

    @abstractmethod
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        """Add ``copy``, which entered the tier, to the eviction order."""

    def on_stay(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        """Add ``copy`` again: it was picked as a victim, but stayed in the tier.

        The call must not count as a hit or as a return after an eviction. But ``copy`` moves to
        the end of the eviction order, so that the next pick does not return this copy. The
        default implementation inserts ``copy``. Policies that record evictions override it.
        """
        self.on_insert(copy, ctx)

    @abstractmethod
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        """Record a use of ``copy``."""

    @abstractmethod
    def on_remove(self, copy: ChunkCopy) -> None:
        """Drop the member ``copy``, which left the tier for a reason other than :meth:`pick`.

        The state of ``copy`` is GONE. A reset makes a new policy, without calls of this method.
        """

    @abstractmethod
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        """Remove one victim from the members and return it.

        A candidate that ``evictable`` rejects stays a member and counts as just used. So the
        next pick tests other members, and picks take O(1) amortised time.

        Returns:
            A copy that ``evictable`` accepts; None if ``evictable`` rejects all members.
        """

    def pick_many(
        self, count: int, evictable: Evictable, ctx: PolicyContext
    ) -> list[ChunkCopy]:
        """Return up to ``count`` victims, by repeated calls of :meth:`pick`."""
        victims: list[ChunkCopy] = []
        while len(victims) < count:
            victim = self.pick(evictable, ctx)
            if victim is None:
                break
            victims.append(victim)
        return victims

    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        """Call :meth:`on_insert` for ``copies``, which arrived together.

        The copies of one prompt are in :attr:`touch_order`, or in the order in which another
        tier evicted the chunks. All these chunks were used at the same time, so a policy may
        insert a prompt from either end. Copies without a parent are inserted in the given
        order.
        """
        for copy in copies:
            self.on_insert(copy, ctx)

    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        """Call :meth:`on_hit` for ``copies``, which are in :attr:`touch_order`."""
        for copy in copies:
            self.on_hit(copy, ctx)


class Promotion(Enum):
    """The effect of a promotion on the copy in the slower tier."""

    COPY = "copy"
    """Both tiers keep the chunk."""
    MOVE = "move"
    """The slower tier drops its copy once the chunk is in RAM."""


class Placement(ABC):
    """Decides which tiers should have a chunk. Tiers are indices; 0 is RAM.

    One thread makes all calls, in batches of chunks. The manager carries out each answer,
    unless no slot is free or a transfer fails. The manager does not report these cases to the
    placement. A placement may read copies, but must not change or keep them. The memory of a
    placement must be bounded.

    A placement does not make three decisions. :class:`Eviction` picks the victims of a full
    tier. ``copy.terms`` excludes tiers for a request. An :class:`~kvtier.policies.Admission`
    may refuse a chunk that the placement sends to a tier.

    Args:
        tiers: Number of tiers, RAM included.

    Attributes:
        tiers: Number of tiers, RAM included.
    """

    def __init__(self, tiers: int) -> None:
        self.tiers = tiers

    @property
    def places_used(self) -> bool:
        """Whether the manager also calls :meth:`place` when a chunk is loaded from RAM.

        The value must not change.
        """
        return False

    @abstractmethod
    def place(self, copy: ChunkCopy, ctx: PolicyContext) -> Sequence[int]:
        """Return the slower tiers to which the chunk must be copied as soon as possible.

        The manager calls this method when a chunk's store is complete and no slower tier has
        the chunk. If :attr:`places_used` is true, the manager also calls this method at each
        load from RAM.

        Args:
            copy: The chunk's complete copy in RAM.
            ctx: The context.

        Returns:
            Indices of slower tiers, each once; empty if RAM suffices.
        """

    def place_many(
        self, copies: Sequence[ChunkCopy], ctx: PolicyContext
    ) -> Sequence[Sequence[int]]:
        """Return the answer of :meth:`place` for each of ``copies``."""
        return [self.place(copy, ctx) for copy in copies]

    @abstractmethod
    def promote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> Promotion:
        """Return how to promote ``copy`` from tier ``source`` for a waiting request.

        The manager calls this method once for each planned promotion, before ``copy.hits``
        counts the promotion.
        """

    def promote_many(
        self, copies: Sequence[ChunkCopy], source: int, ctx: PolicyContext
    ) -> Sequence[Promotion]:
        """Return the answer of :meth:`promote` for each of ``copies``, at least one."""
        return [self.promote(copy, source, ctx) for copy in copies]

    def demotion_targets(self, source: int) -> Sequence[int]:
        """Return the tiers that :meth:`demote` may choose for victims of ``source``.

        The answer must not change. A tier without targets needs no reserve of free slots. A
        tier with several targets stops demoting while any target is full.

        Args:
            source: Index of the tier.
        """
        return range(source + 1, self.tiers)

    @abstractmethod
    def demote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> int | None:
        """Return the tier that must receive the chunk before ``source`` evicts ``copy``.

        The manager calls this method only for chunks that are in no slower tier. The manager
        may call it several times for one chunk: when the chunk is new in ``source``, when the
        chunk is picked as a victim, and at shutdown.

        Returns:
            One of :meth:`demotion_targets`; None to drop the chunk.
        """

    def demote_many(
        self, copies: Sequence[ChunkCopy], source: int, ctx: PolicyContext
    ) -> Sequence[int | None]:
        """Return the answer of :meth:`demote` for each of ``copies``."""
        return [self.demote(copy, source, ctx) for copy in copies]
