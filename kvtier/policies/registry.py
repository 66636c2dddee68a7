"""Policies by name: built in, from installed packages, or any class as ``module:Class``.

A new eviction policy of kvtier's own is a module in ``kvtier/policies/eviction`` and a line in
:data:`EVICTIONS`; nothing else lists the names. Classes are named as text, so that
reading a configuration does not import policies.

The constructor of every policy takes one number: the size of the tier or cache. There are no
options: a variant is a class of its own. Only ``tiered`` also takes settings.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Generic, TypeVar, cast

from kvtier.errors import ConfigError, did_you_mean
from kvtier.policies.admission import Admission
from kvtier.policies.base import Eviction, Placement

__all__ = [
    "ADMISSIONS",
    "CLASS_PATTERN",
    "EVICTIONS",
    "PLACEMENTS",
    "PolicyRole",
    "build_admission",
    "build_eviction",
    "build_placement",
    "path_remedy",
]

PolicyT = TypeVar("PolicyT")

CLASS_PATTERN: Final = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""The form ``module:Class``, for a class that no package registers under a name."""


def path_remedy(point: EntryPoint, error: Exception) -> str:
    """Return how to make the module of a ``module:Class`` importable; "" for other errors."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if point.name == point.value and f"{point.module}.".startswith(f"{missing}."):
        return f"put the directory of {point.module} on PYTHONPATH, the engine's too"
    return ""


@dataclass(frozen=True, slots=True)
class PolicyRole(Generic[PolicyT]):
    """A kind of policy (eviction, placement or admission), and its policies by name.

    Attributes:
        what: The name of such a policy in messages.
        group: The group of entry points in which packages register such policies.
        base: The class that every policy derives from.
        state: Attributes that the base's constructor sets.
        built_in: The built-in policies: name to ``module:Class``.
    """

    what: str
    group: str
    base: type[Any]
    state: tuple[str, ...]
    built_in: Mapping[str, str]

    def installed(self) -> tuple[str, ...]:
        """Return every name that a configuration may give, sorted."""
        return tuple(sorted({*self.built_in, *self._registered()}))

    def obstacle(self, name: str) -> tuple[str, str] | None:
        """Return why the policy ``name`` does not load, and a remedy; None if it loads.

        Also None for a built-in policy, which is not imported, and for an unknown name, which
        the caller must report.
        """
        point = None if name in self.built_in else self._point(name)
        if point is None:
            return None
        try:
            point.load()
        except Exception as error:  # noqa: BLE001 - the import runs third-party code
            remedy = "put its package on the path of Python, or repair it"
            return f"does not load: {error}", path_remedy(point, error) or remedy
        return None

    def schema(self) -> dict[str, object]:
        """Return the JSON Schema of a policy's name."""
        names = {"enum": list(self.installed())}
        return {"type": "string", "anyOf": [names, {"pattern": CLASS_PATTERN}]}

    def load(self, name: str) -> type[PolicyT]:
        """Return the class called ``name``.

        Args:
            name: A built-in policy, a registered name of an installed package, or
                ``module:Class``.

        Raises:
            ConfigError: There is no such policy, or its class is not usable.
        """
        point = self._point(name)
        if point is None:
            known = self.installed()
            remedy = f"or name a class as module:Class{did_you_mean(name, known)}"
            problem = f"unknown {self.what} {name!r}; installed: {', '.join(known)}"
            raise ConfigError(f"{problem}; {remedy}")
        try:
            loaded = point.load()
        except Exception as error:  # the import runs third-party code
            problem = f"{self.what} {name!r} ({point.value}) does not load: {error}"
            remedy = (
                path_remedy(point, error) or "repair or remove the package that provides it"
            )
            raise ConfigError(f"{problem}; {remedy}") from error
        self._check_class(f"{self.what} {name!r}", point.value, loaded)
        return cast("type[PolicyT]", loaded)

    def make(self, name: str, size: int, **settings: object) -> PolicyT:
        """Return a new policy called ``name`` for a tier or cache of ``size``.

        Args:
            name: As for :meth:`load`.
            size: The size.
            **settings: Further arguments of the policy's constructor.

        Raises:
            ConfigError: There is no such policy, or it cannot be made.
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
        """Turn any error in the constructor of the policy ``name`` into a ConfigError."""
        try:
            yield
        except Exception as error:  # the constructor is third-party code
            problem = f"{self.what} {name!r} cannot be made: {error}"
            raise ConfigError(f"{problem}; repair the class") from error

    def _check_class(self, policy: str, value: str, loaded: object) -> None:
        base = self.base.__name__
        if not (isinstance(loaded, type) and issubclass(loaded, self.base)):
            problem = f"{policy}: {value} is no {base}"
            raise ConfigError(f"{problem}; derive it from kvtier.policies.{base}")
        missing = ", ".join(sorted(getattr(loaded, "__abstractmethods__", ())))
        if missing:
            problem = f"{policy}: {value} leaves out {missing}"
            raise ConfigError(f"{problem}; kvtier.policies.{base} says what each must do")
        try:
            inspect.signature(loaded).bind(1)
        except TypeError as error:
            problem = f"{policy}: {value} cannot be made from one number: {error}"
            remedy = f"`__init__` must accept one number, like kvtier.policies.{base}"
            raise ConfigError(f"{problem}; {remedy}") from error

    def _registered(self) -> set[str]:
        return entry_points(group=self.group).names

    def _point(self, name: str) -> EntryPoint | None:
        if value := self.built_in.get(name):
            return EntryPoint(name, value, self.group)
        if re.fullmatch(CLASS_PATTERN, name):
            return EntryPoint(name, name, self.group)
        return entry_points(group=self.group)[name] if name in self._registered() else None


EVICTIONS: Final[PolicyRole[Eviction]] = PolicyRole(
    "eviction policy",
    "kvtier.eviction",
    Eviction,
    ("capacity", "tracks_misses"),
    {
        "2q": "kvtier.policies.eviction.two_q:TwoQ",
        "arc": "kvtier.policies.eviction.arc:Arc",
        "fifo": "kvtier.policies.eviction.lru:Fifo",
        "hedged-lhd": "kvtier.policies.eviction.hedged_lhd:HedgedLhd",
        "lfu": "kvtier.policies.eviction.scored:Lfu",
        "lirs": "kvtier.policies.eviction.lirs:Lirs",
        "lru": "kvtier.policies.eviction.lru:Lru",
        "s3-fifo": "kvtier.policies.eviction.s3_fifo:S3Fifo",
        "sieve": "kvtier.policies.eviction.sieve:Sieve",
        "slru": "kvtier.policies.eviction.slru:Slru",
        "w-tinylfu": "kvtier.policies.eviction.w_tinylfu:WTinyLfu",
    },
)
PLACEMENTS: Final[PolicyRole[Placement]] = PolicyRole(
    "placement policy",
    "kvtier.placement",
    Placement,
    ("tiers",),
    {"tiered": "kvtier.policies.placement:TieredPlacement"},
)
ADMISSIONS: Final[PolicyRole[Admission]] = PolicyRole(
    "admission policy",
    "kvtier.admission",
    Admission,
    ("capacity",),
    {
        "all": "kvtier.policies.admission:AdmitAll",
        "second-touch": "kvtier.policies.admission:SecondTouch",
        "tinylfu": "kvtier.policies.admission:TinyLfu",
    },
)


def build_eviction(name: str, *, capacity: int) -> Eviction:
    """Build the eviction policy called ``name`` for a tier of ``capacity`` slots.

    Args:
        name: A built-in policy, a registered name of an installed package, or ``module:Class``.
        capacity: Slots of the tier.

    Raises:
        ConfigError: There is no such policy, or it cannot be made.
    """
    return EVICTIONS.make(name, capacity)


def build_placement(name: str, *, tiers: int, **settings: object) -> Placement:
    """Build the placement policy called ``name`` for a cache of ``tiers`` tiers.

    Args:
        name: As for :func:`build_eviction`.
        tiers: Number of tiers, RAM included.
        **settings: Settings of ``tiered``; the default is used for those not given.

    Raises:
        ConfigError: There is no such policy, or it cannot be made.
    """
    return PLACEMENTS.make(name, tiers, **settings)


def build_admission(name: str, *, capacity: int) -> Admission:
    """Build the admission policy called ``name``.

    Args:
        name: As for :func:`build_eviction`.
        capacity: Chunks of RAM and of the largest tier together.

    Raises:
        ConfigError: There is no such policy, or it cannot be made.
    """
    return ADMISSIONS.make(name, capacity)
