"""Finds policies by name: built-in policies, policies of packages, and ``module:Class``.

To add a built-in eviction policy, add a module to ``kvtier/policies/eviction`` and a line to
:data:`EVICTIONS`, which is the only list of names.

The constructor of every policy has one argument: the size of the tier or cache. A variant of a
policy is a separate class. Only ``tiered`` has settings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar, cast

from kvtier.errors import ConfigError
from kvtier.named_classes import CLASS_PATTERN, NamedClasses
from kvtier.policies.admission import Admission
from kvtier.policies.base import Eviction, Placement

__all__ = [
    "ADMISSIONS",
    "EVICTIONS",
    "PLACEMENTS",
    "PolicyRole",
    "build_admission",
    "build_eviction",
    "build_placement",
]

PolicyT = TypeVar("PolicyT")


@dataclass(frozen=True, slots=True)
class PolicyRole(NamedClasses, Generic[PolicyT]):
    """A kind of policy (eviction, placement or admission), and its policies by name.

    Attributes:
        base: The class that every policy derives from.
        state: Names of attributes that the base's constructor sets.
    """

    base: type[Any]
    state: tuple[str, ...]

    def schema(self) -> dict[str, object]:
        """Return the JSON Schema for the name of a policy."""
        names = {"enum": list(self.installed())}
        return {"type": "string", "anyOf": [names, {"pattern": CLASS_PATTERN}]}

    def load(self, name: str) -> type[PolicyT]:
        """Return the policy class called ``name``.

        Args:
            name: A built-in policy, a registered name of an installed package, or
                ``module:Class``.

        Raises:
            ConfigError: The policy is unknown, or its class is not usable.
        """
        loaded = self.find_derived(name, self.base)
        try:
            inspect.signature(loaded).bind(1)
        except TypeError as error:
            problem = f"{self.what} {name!r} cannot be made from one number: {error}"
            base = f"kvtier.policies.{self.base.__name__}"
            remedy = f"`__init__` must accept one number, like {base}"
            raise ConfigError(f"{problem}; {remedy}") from error
        return cast("type[PolicyT]", loaded)

    def make(self, name: str, size: int, **settings: object) -> PolicyT:
        """Return a new policy called ``name`` for a tier or cache of ``size``.

        Args:
            name: As for :meth:`load`.
            size: The number of slots or tiers.
            **settings: Further arguments of the policy's constructor.

        Raises:
            ConfigError: The policy is unknown or cannot be made.
        """
        factory = cast("Callable[..., PolicyT]", self.load(name))
        with self.making(name):
            policy = factory(size, **settings)
        unset = ", ".join(each for each in self.state if not hasattr(policy, each))
        if unset:
            problem = f"{self.what} {name!r} has no {unset}"
            raise ConfigError(f"{problem}; its __init__ must call super().__init__()")
        return policy

    @contextmanager
    def making(self, name: str) -> Iterator[None]:
        """Convert an error of the ``with`` block to a ConfigError about the policy ``name``."""
        try:
            yield
        except Exception as error:  # the constructor is third-party code
            problem = f"{self.what} {name!r} cannot be made: {error}"
            raise ConfigError(f"{problem}; repair the class") from error


EVICTIONS: Final[PolicyRole[Eviction]] = PolicyRole(
    "eviction policy",
    ("kvtier.eviction",),
    {
        "2q": "kvtier.policies.eviction.two_q:TwoQ",
        "arc": "kvtier.policies.eviction.arc:Arc",
        "fifo": "kvtier.policies.eviction.lru:Fifo",
        "lhd": "kvtier.policies.eviction.lhd:Lhd",
        "lirs": "kvtier.policies.eviction.lirs:Lirs",
        "lru": "kvtier.policies.eviction.lru:Lru",
        "s3-fifo": "kvtier.policies.eviction.s3_fifo:S3Fifo",
        "slru": "kvtier.policies.eviction.slru:Slru",
        "w-tinylfu": "kvtier.policies.eviction.w_tinylfu:WTinyLfu",
    },
    Eviction,
    ("capacity", "tracks_misses"),
)
PLACEMENTS: Final[PolicyRole[Placement]] = PolicyRole(
    "placement policy",
    ("kvtier.placement",),
    {"tiered": "kvtier.policies.placement:TieredPlacement"},
    Placement,
    ("tiers",),
)
ADMISSIONS: Final[PolicyRole[Admission]] = PolicyRole(
    "admission policy",
    ("kvtier.admission",),
    {
        "all": "kvtier.policies.admission:AdmitAll",
        "second-touch": "kvtier.policies.admission:SecondTouch",
    },
    Admission,
    ("capacity",),
)


def build_eviction(name: str, *, capacity: int) -> Eviction:
    """Build the eviction policy called ``name`` for a tier of ``capacity`` slots.

    Args:
        name: A built-in policy, a registered name of an installed package, or ``module:Class``.
        capacity: Number of slots of the tier.

    Raises:
        ConfigError: The policy is unknown or cannot be made.
    """
    return EVICTIONS.make(name, capacity)


def build_placement(name: str, *, tiers: int, **settings: object) -> Placement:
    """Build the placement policy called ``name`` for a cache of ``tiers`` tiers.

    Args:
        name: As for :func:`build_eviction`.
        tiers: Number of tiers, RAM included.
        **settings: Settings of ``tiered``; omitted settings have their defaults.

    Raises:
        ConfigError: The policy is unknown or cannot be made.
    """
    return PLACEMENTS.make(name, tiers, **settings)


def build_admission(name: str, *, capacity: int) -> Admission:
    """Build the admission policy called ``name``.

    Args:
        name: As for :func:`build_eviction`.
        capacity: Number of slots of RAM and the largest tier together.

    Raises:
        ConfigError: The policy is unknown or cannot be made.
    """
    return ADMISSIONS.make(name, capacity)
