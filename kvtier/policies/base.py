"""What a policy sees and what it must answer.

Two small protocols share the work. An :class:`Eviction` orders the copies of *one* tier and
names victims. A :class:`Placement`, one per cache, decides what crosses tiers. Neither does
I/O, awaits, reads a clock or draws its own random numbers: time and randomness arrive in a
:class:`PolicyContext`. So the live engine and a simulator can drive the very same object, and
a policy tuned on a trace is deployed unchanged.
"""

from __future__ import annotations

import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

from kvtier.errors import KvtierError
from kvtier.keys import ChunkKey
from kvtier.policies.terms import NO_TERMS
from kvtier.types import Purpose

__all__ = [
    "NEVER",
    "ChunkCopy",
    "CopyState",
    "Evictable",
    "Eviction",
    "NoVictimError",
    "Placement",
    "PolicyContext",
    "Promotion",
    "is_idle",
    "is_unpinned",
]

NEVER: Final = sys.maxsize
"""The next use of a chunk that is not used again."""


class CopyState:
    """The states of a copy, as plain integers because they are compared once per chunk."""

    WRITING: ClassVar[int] = 0
    """Bytes are on their way; whoever needs them may wait."""
    LATE: ClassVar[int] = 1
    """Bytes are still on their way but their deadline passed; nobody waits."""
    RESIDENT: ClassVar[int] = 2
    """Whole: a hit."""
    GONE: ClassVar[int] = 3
    """Left the tier; the object may still be referenced by a queue or a job."""


_WRITING = CopyState.WRITING


class ChunkCopy:
    """One chunk's copy in one tier.

    Owned by the manager. A policy reads it, and owns :attr:`queued` and :attr:`policy` of the
    copies in its tier.

    Attributes:
        key: The chunk's key.
        slot: Where the bytes are in this tier.
        state: One of :class:`CopyState`.
        pins: Reasons not to evict: transfers that touch it and requests it is kept for.
        dirty: Slower tiers that must still receive it before it may go.
        hits: Loads served from this copy, and promotions begun from it.
        parent: Key of the preceding chunk of the prefix, None at the root or where unknown.
        depth: Chunks before it in the prefix.
        terms: What the request that stored it asked for; shared by all that it stored.
        child_count: Copies in this tier whose parent this is; only for ``leaf_only`` policies.
        queued: For the eviction policy: stale entries of its queue that name this copy.
        policy: For the eviction policy: anything else.
        grants: Waiting requests this copy is kept for; each is also a pin.
        origin: Index of the tier the bytes came from when it is loaded the first time.
        transient: Whether it goes as soon as the request it was fetched for has loaded it.
        generation: Stamp of the write that fills the slot; never repeats.
    """

    __slots__ = (
        "child_count",
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
        "transient",
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
        self.child_count = 0
        self.queued = 0
        self.policy: Any = None
        self.grants = 0
        self.origin = 0
        self.transient = False
        self.generation = generation

    @property
    def session(self) -> str:
        """What the request that stored it said it belongs to; empty if it did not say."""
        return self.terms.session

    def __repr__(self) -> str:
        state = ("writing", "late", "resident", "gone")[self.state]
        return f"<ChunkCopy {self.key.hex()[:12]} slot={self.slot} {state} pins={self.pins}>"


@dataclass(slots=True)
class PolicyContext:
    """What a policy may know besides the copy; one object, reused.

    Attributes:
        now: Seconds on a monotonic clock that the driver advances once per step; an engine may
            leave out steps in which nothing is to be decided.
        rng: The only source of randomness; seeded by the driver.
        request: Identifies the request being served, empty when there is none.
        session: What that request said it belongs to, empty if it did not say.
        next_use: When the chunk at hand is used next, as a position in the trace; set by a
            simulator for policies that need the future, before each use and insertion.
    """

    now: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    request: str = ""
    session: str = ""
    next_use: int = NEVER


class NoVictimError(KvtierError):
    """An eviction policy returned no victim although every member may go."""

    def __init__(self, eviction: Eviction) -> None:
        kind: type[object] = type(eviction)
        problem = f"eviction policy {kind.__module__}:{kind.__qualname__} picks no victim"
        super().__init__(f"{problem} although every chunk may go; repair its pick")


Evictable = Callable[[ChunkCopy], bool]


def is_idle(copy: ChunkCopy) -> bool:
    """Return whether nothing needs a resident ``copy`` in its tier."""
    return not copy.pins and not copy.dirty


def is_unpinned(copy: ChunkCopy) -> bool:
    """Return whether nobody touches ``copy``, though a slower tier may have yet to get it."""
    return not copy.pins


class Eviction(ABC):
    """Orders the copies of one tier.

    For a chunk that is here the driver calls :meth:`on_hit`. For one that is not it calls
    :meth:`on_miss` once, then :meth:`pick` until there is room, then :meth:`on_insert` when the
    bytes have arrived, if they do. Several chunks may be between their miss and their
    insertion at a time.

    Every method is O(1) amortised (O(log n) where scored). A policy may remember keys that left
    (ghosts), at most twice the tier's capacity of them. It keeps no reference to a copy that
    it picked: the driver may reuse the object for another chunk, and what the policy wrote to
    its ``queued`` and ``policy`` is then still there.

    Args:
        capacity: Slots of the tier, at least 1; ``kvtier check`` makes it for 1.

    Attributes:
        tracks_misses: Whether :meth:`on_miss` does anything; if not, a driver may save the
            calls.
    """

    leaf_only: ClassVar[bool] = False
    """Whether only copies without resident children may be picked. The driver then keeps
    ``copy.child_count``: it counts a child before the child's insertion, and takes it off right
    after the child was picked or removed."""

    insert_first: ClassVar[bool] = False
    """Whether a newcomer competes with the residents. A driver that moves no bytes then inserts
    before it picks, and may be given the newcomer back; a tier, whose slots are all in use,
    picks first."""

    sheds: ClassVar[bool] = False
    """Whether a hit may leave ``surplus`` above zero: as many members should go. A driver that
    moves no bytes then picks them at once; a tier does not, for an empty slot serves nobody."""

    needs_future: ClassVar[bool] = False
    """Whether ``ctx.next_use`` must be set, which only a simulator can do."""

    touch_order: ClassVar[Literal["reverse", "forward"]] = "reverse"
    """Order in which the manager reports what a request used, and what it stored at once.
    ``reverse`` is leaf to root, so that of one prefix the root stays longest; ``forward`` is
    root to leaf. Chunks of several KV cache groups come by depth, not group after group."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.surplus = 0
        self.tracks_misses = type(self).on_miss is not Eviction.on_miss

    def on_miss(self, key: ChunkKey, ctx: PolicyContext) -> None:  # noqa: B027 - a default that works
        """Note that ``key`` was asked for, is not here, and is about to be let in.

        Called once for each insertion, before room is made for it. Policies that keep no memory
        of absent keys have nothing to do.
        """

    @abstractmethod
    def on_insert(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        """Note that ``copy`` became a member of the tier."""

    def on_stay(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        """Note that ``copy``, which was picked, did not go: it is a member again.

        That is no use and no return of a chunk that had left. It counts as just used all the
        same, as one that was rejected does, or it would be picked again at once. Unless a
        policy keeps account of what left, letting it in like a new one will do.
        """
        self.on_insert(copy, ctx)

    @abstractmethod
    def on_hit(self, copy: ChunkCopy, ctx: PolicyContext) -> None:
        """Note that ``copy`` was used."""

    @abstractmethod
    def on_remove(self, copy: ChunkCopy) -> None:
        """Note that ``copy`` left for another reason than being picked; its state says GONE."""

    @abstractmethod
    def pick(self, evictable: Evictable, ctx: PolicyContext) -> ChunkCopy | None:
        """Remove one victim from the order and return it.

        A candidate that ``evictable`` rejects stays a member and counts as just used, so that
        the next pick does not ask for it again and scans stay O(1) amortised.

        Returns:
            A copy with ``evictable(copy)``, or None when there is none.
        """

    def pick_many(
        self, count: int, evictable: Evictable, ctx: PolicyContext
    ) -> list[ChunkCopy]:
        """Do :meth:`pick` up to ``count`` times; fewer victims when there are no more."""
        victims: list[ChunkCopy] = []
        while len(victims) < count:
            victim = self.pick(evictable, ctx)
            if victim is None:
                break
            victims.append(victim)
        return victims

    def on_insert_many(self, copies: Sequence[ChunkCopy], ctx: PolicyContext) -> None:
        """Do :meth:`on_insert` for ``copies``, which became members together.

        Those of one prompt come in :attr:`touch_order`, or in the order in which another tier
        evicted them. As none was used before another, a policy may let a prompt in from either
        end, whichever way it came. Copies that name no parent enter in the order given.
        """
        for copy in copies:
            self.on_insert(copy, ctx)

    def on_hit_many(self, copies: Iterable[ChunkCopy], ctx: PolicyContext) -> None:
        """Do :meth:`on_hit` for ``copies``, already in :attr:`touch_order`."""
        for copy in copies:
            self.on_hit(copy, ctx)


@dataclass(frozen=True, slots=True)
class Promotion:
    """How a chunk found in a slower tier is brought up.

    Attributes:
        keep_source: Whether the slower tier keeps its copy. If not, the copy in RAM stays.
        stay: Whether the copy in RAM outlives the load it is made for.
    """

    keep_source: bool = True
    stay: bool = True


class Placement(ABC):
    """Decides which tiers a chunk should be in. Tiers are indices, 0 is RAM.

    One object serves a cache for as long as it runs, and is asked by one thread, with the
    chunks of one moment in each call. An answer is final: what it says is done unless there is
    no room or a transfer fails, and the placement does not hear of either. Copies are the
    manager's; a placement reads them, writes to none and keeps none. What it remembers it
    bounds itself.

    Not its affair, whatever it answers: who leaves a full tier (:class:`Eviction`), what a
    request may not be in (``copy.terms``), and the conditions of a file's ``admit`` and
    ``write_budget_per_day``, which are asked after :meth:`admit`.

    Args:
        tiers: Number of tiers, RAM included.

    Attributes:
        tiers: That number.
    """

    def __init__(self, tiers: int) -> None:
        self.tiers = tiers

    @property
    def places_used(self) -> bool:
        """Whether :meth:`place` is also asked about chunks that were loaded from RAM.

        The same for the life of the object, as is :attr:`min_chunks`.
        """
        return False

    @property
    def min_chunks(self) -> int:
        """Length of the shortest prefix that is worth copying down, in chunks.

        The chunks of a shorter one are not asked about until a later one makes it long enough.
        """
        return 1

    @abstractmethod
    def place(self, copy: ChunkCopy, ctx: PolicyContext) -> Sequence[int]:
        """Return the slower tiers that a chunk in RAM must reach as soon as possible.

        Asked about every chunk that is new there and in no slower tier, when its store is
        complete, and with :attr:`places_used` again at each use.

        Args:
            copy: The chunk's copy in RAM, whole.
            ctx: What else may be known.

        Returns:
            Slower tiers, each once; none where RAM will do.
        """

    def admit(
        self,
        copy: ChunkCopy,  # noqa: ARG002 - a default that works
        tier: int,  # noqa: ARG002
        purpose: Purpose,  # noqa: ARG002
        ctx: PolicyContext,  # noqa: ARG002
    ) -> bool:
        """Return whether ``copy`` may enter ``tier``; a refusal is counted, not retried.

        Asked about what :meth:`place` or :meth:`demote` sends to ``tier``, right before it
        goes. All may, unless a placement knows better.
        """
        return True

    def place_many(
        self, copies: Sequence[ChunkCopy], ctx: PolicyContext
    ) -> Sequence[Sequence[int]]:
        """Do :meth:`place` for ``copies``; worth its own lines where all are treated alike."""
        return [self.place(copy, ctx) for copy in copies]

    def admit_many(
        self, copies: Sequence[ChunkCopy], tier: int, purpose: Purpose, ctx: PolicyContext
    ) -> Sequence[bool]:
        """Do :meth:`admit` for ``copies``."""
        return [self.admit(copy, tier, purpose, ctx) for copy in copies]

    @abstractmethod
    def promote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> Promotion:
        """Return how to bring up ``copy``, found in tier ``source`` for a waiting request.

        Asked when the promotion is planned, once for each; ``copy.hits`` does not count it yet.
        """

    def promote_many(
        self, copies: Sequence[ChunkCopy], source: int, ctx: PolicyContext
    ) -> Sequence[Promotion]:
        """Do :meth:`promote` for ``copies``, of which there is at least one."""
        return [self.promote(copy, source, ctx) for copy in copies]

    def demotion_targets(self, source: int, tiers: int) -> Sequence[int]:
        """Return the tiers that :meth:`demote` may name for victims of ``source``.

        Always the same ones. A tier whose victims go nowhere needs no reserve of free slots;
        one with several targets sends nothing down while any of them is full.

        Args:
            source: Index of the tier.
            tiers: Number of tiers.
        """
        return range(source + 1, tiers)

    @abstractmethod
    def demote(self, copy: ChunkCopy, source: int, ctx: PolicyContext) -> int | None:
        """Return the tier that ``copy`` must reach before it leaves ``source``, or None.

        Asked only about chunks that no slower tier has, and about one chunk perhaps several
        times: when it is new in ``source``, so that it is known to be owed, when it is picked
        to leave, and at a shutdown.

        Returns:
            One of :meth:`demotion_targets`; None to let it go.
        """

    def demote_many(
        self, copies: Sequence[ChunkCopy], source: int, ctx: PolicyContext
    ) -> Sequence[int | None]:
        """Do :meth:`demote` for ``copies``."""
        return [self.demote(copy, source, ctx) for copy in copies]
