"""Policies by name: kvtier's own, those of installed packages, and any other class.

All are made the same way: the class is called with one number that says how large the cache
is. There are no options; a variant is a class of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Generic, TypeVar, cast

from kvtier.errors import ConfigError, did_you_mean
from kvtier.policies import eviction
from kvtier.policies.admission import Admission, SecondTouch, TinyLfu
from kvtier.policies.base import Eviction, Placement
from kvtier.policies.placement import LadderPlacement

__all__ = [
    "ADMISSIONS",
    "BUILT_IN_EVICTIONS",
    "EVICTIONS",
    "PLACEMENTS",
    "PolicyRole",
    "build_admission",
    "build_eviction",
    "build_placement",
]

PolicyT = TypeVar("PolicyT")

BUILT_IN_EVICTIONS: Final[dict[str, type[Eviction]]] = {
    "arc": eviction.Arc,
    "belady": eviction.Belady,
    "fifo": eviction.Fifo,
    "gdsf": eviction.Gdsf,
    "hedged-lhd": eviction.HedgedLhd,
    "lfu": eviction.Lfu,
    "lirs": eviction.Lirs,
    "lru": eviction.Lru,
    "2q": eviction.TwoQ,
    "prefix-lru": eviction.PrefixLru,
    "s3-fifo": eviction.S3Fifo,
    "sieve": eviction.Sieve,
    "slru": eviction.Slru,
    "slru-4": eviction.Slru4,
    "w-tinylfu": eviction.WTinyLfu,
    "w-tinylfu-exact": eviction.WTinyLfuExact,
}


@dataclass(frozen=True, slots=True)
class PolicyRole(Generic[PolicyT]):
    """One of the things that a policy can be for.

    Attributes:
        what: What messages call such a policy.
        group: Entry points: a policy's name -> its class.
        base: What the class must be derived from.
        state: Attributes that the base's constructor sets.
        built_in: kvtier's own, by name.
    """

    what: str
    group: str
    base: type[Any]
    state: tuple[str, ...]
    built_in: Mapping[str, type[PolicyT]]

    def named(self, name: str) -> type[PolicyT]:
        """Return the class called ``name``.

        Args:
            name: A built-in policy, the entry point of an installed package, or
                ``module:Class``.

        Raises:
            ConfigError: There is no such policy, or it cannot be made.
        """
        return self.built_in.get(name) or self._loaded(self._point(name))

    def _point(self, name: str) -> EntryPoint:
        if ":" in name:
            return EntryPoint(name=name, value=name, group=self.group)
        installed = entry_points(group=self.group)
        if name not in installed.names:
            known = sorted({*self.built_in, *installed.names})
            remedy = f"or name a class as module:Class{did_you_mean(name, known)}"
            problem = f"unknown {self.what} {name!r}; installed: {', '.join(known)}"
            raise ConfigError(f"{problem}; {remedy}")
        return installed[name]

    def _loaded(self, point: EntryPoint) -> type[PolicyT]:
        policy = f"{self.what} {point.name!r}"
        try:
            loaded = point.load()
        except Exception as error:  # importing it runs somebody's code
            problem = f"{policy} ({point.value}) does not load: {error}"
            remedy = "repair or remove the package that provides it"
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if point.name == point.value and f"{point.module}.".startswith(f"{missing}."):
                remedy = f"put the directory of {point.module} on PYTHONPATH"
            raise ConfigError(f"{problem}; {remedy}") from error
        base = self.base.__name__
        if not (isinstance(loaded, type) and issubclass(loaded, self.base)):
            problem = f"{policy}: {point.value} is no {base}"
            raise ConfigError(f"{problem}; derive it from kvtier.policies.{base}")
        missing = ", ".join(sorted(getattr(loaded, "__abstractmethods__", ())))
        if missing:
            problem = f"{policy}: {point.value} leaves out {missing}"
            raise ConfigError(f"{problem}; kvtier.policies.{base} says what each must do")
        try:
            inspect.signature(loaded).bind(1)
        except TypeError as error:
            problem = f"{policy}: {point.value} cannot be made from one number: {error}"
            raise ConfigError(f"{problem}; take what kvtier.policies.{base} takes") from error
        return cast("type[PolicyT]", loaded)

    def make(self, name: str, size: int) -> PolicyT:
        """Return a new policy called ``name`` for a cache of ``size``.

        Raises:
            ConfigError: There is no such policy, or it cannot be made.
        """
        factory = cast("Callable[[int], PolicyT]", self.named(name))
        with self.making(name):
            policy = factory(size)
        unset = ", ".join(each for each in self.state if not hasattr(policy, each))
        if unset:
            problem = f"{self.what} {name!r} has no {unset}"
            raise ConfigError(f"{problem}; its __init__ must call super().__init__()")
        return policy

    @contextmanager
    def making(self, name: str) -> Iterator[None]:
        """Turn what a policy called ``name`` raises when it is made into a ConfigError."""
        try:
            yield
        except Exception as error:  # making it runs somebody's code
            problem = f"{self.what} {name!r} cannot be made: {error}"
            raise ConfigError(f"{problem}; repair the class") from error


EVICTIONS: Final[PolicyRole[Eviction]] = PolicyRole(
    "eviction policy",
    "kvtier.eviction",
    Eviction,
    ("capacity", "surplus", "tracks_misses"),
    BUILT_IN_EVICTIONS,
)
PLACEMENTS: Final[PolicyRole[Placement]] = PolicyRole(
    "placement policy",
    "kvtier.placement",
    Placement,
    ("tiers",),
    {"ladder": LadderPlacement},
)
ADMISSIONS: Final[PolicyRole[Admission]] = PolicyRole(
    "admission policy",
    "kvtier.admission",
    Admission,
    ("capacity",),
    {"second-touch": SecondTouch, "tinylfu": TinyLfu},
)


def build_eviction(name: str, *, capacity: int, future: bool = False) -> Eviction:
    """Build the eviction policy called ``name`` for a tier of ``capacity`` slots.

    Args:
        name: A built-in policy, the entry point of an installed package, or ``module:Class``.
        capacity: Slots of the tier.
        future: Whether the caller sets ``ctx.next_use``, as a simulator can.

    Raises:
        ConfigError: There is no such policy, it cannot be made, or it needs a future that
            nobody knows.
    """
    if EVICTIONS.named(name).needs_future and not future:
        problem = f"eviction policy {name!r} must know the future"
        raise ConfigError(f"{problem}; use it in kvtier sim, and another one in a live tier")
    return EVICTIONS.make(name, capacity)


def build_placement(name: str, *, tiers: int) -> Placement:
    """Build the placement policy called ``name`` for a cache of ``tiers`` tiers.

    Args:
        name: As for :func:`build_eviction`; ``ladder`` is made with its defaults.
        tiers: Number of tiers, RAM included.

    Raises:
        ConfigError: There is no such policy, or it cannot be made.
    """
    placement = PLACEMENTS.make(name, tiers)
    with PLACEMENTS.making(name):
        if not isinstance(placement.min_chunks, int):
            raise TypeError(f"min_chunks is {placement.min_chunks!r} and no int")
    return placement


def build_admission(name: str, *, capacity: int) -> Admission:
    """Build the admission policy called ``name``.

    Args:
        name: As for :func:`build_eviction`.
        capacity: Chunks of RAM and of the largest tier together.

    Raises:
        ConfigError: There is no such policy, or it cannot be made.
    """
    return ADMISSIONS.make(name, capacity)
