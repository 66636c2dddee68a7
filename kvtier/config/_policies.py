"""What a file may name as a policy: what is built in, what packages add, and any class.

The built-in names are known here directly, so that a configuration can be read without
importing the policies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from kvtier.config._models import KvtierConfig

__all__ = [
    "ADMISSION",
    "CLASS_PATTERN",
    "EVICTION",
    "PLACEMENT",
    "PolicyNames",
    "has_custom_policies",
    "remedy_for",
]

CLASS_PATTERN: Final = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"
"""How a class is named that no package provides under a name of its own: ``module:Class``."""


def remedy_for(point: EntryPoint, error: Exception) -> str:
    """Return what helps if ``point`` names a module that Python does not find; else empty."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if point.name == point.value and f"{point.module}.".startswith(f"{missing}."):
        return f"put the directory of {point.module} on PYTHONPATH, the engine's too"
    return ""


@dataclass(frozen=True, slots=True)
class PolicyNames:
    """The names of policies for one thing.

    Attributes:
        what: What messages call such a policy.
        group: Entry points: a policy's name -> its class.
        built_in: What kvtier itself has.
        offline: What it has for its simulator alone.
    """

    what: str
    group: str
    built_in: frozenset[str]
    offline: frozenset[str] = frozenset()

    def installed(self) -> tuple[str, ...]:
        """Return every name that a file may give, classes aside."""
        return tuple(sorted({*self.built_in, *self._points()} - self.offline))

    def obstacle(self, name: str) -> tuple[str, str] | None:
        """Return what keeps the policy called ``name`` from being used, and a remedy.

        A name that nobody knows is no obstacle here: :meth:`installed` does not have it.

        Args:
            name: A policy's name, known or not, or ``module:Class``.
        """
        if name in self.offline:
            return "a policy that must know the future", "use it with kvtier sim run --policy"
        if name in self.built_in:
            return None
        if re.fullmatch(CLASS_PATTERN, name):
            point = EntryPoint(name=name, value=name, group=self.group)
        elif name in self._points():
            point = entry_points(group=self.group)[name]
        else:
            return None
        try:
            point.load()
        except Exception as error:  # noqa: BLE001 - importing it runs somebody's code
            remedy = "put its package on the path of Python, or mend it"
            return f"does not load: {error}", remedy_for(point, error) or remedy
        return None

    def schema(self) -> dict[str, object]:
        """Return the JSON Schema of a name."""
        names = {"enum": list(self.installed())}
        return {"type": "string", "anyOf": [names, {"pattern": CLASS_PATTERN}]}

    def _points(self) -> set[str]:
        return entry_points(group=self.group).names


EVICTION: Final = PolicyNames(
    what="policy",
    group="kvtier.eviction",
    built_in=frozenset(
        [
            "2q",
            "arc",
            "fifo",
            "gdsf",
            "hedged-lhd",
            "lfu",
            "lirs",
            "lru",
            "prefix-lru",
            "s3-fifo",
            "sieve",
            "slru",
            "slru-4",
            "w-tinylfu",
            "w-tinylfu-exact",
        ]
    ),
    offline=frozenset(["belady"]),
)
PLACEMENT: Final = PolicyNames("placement policy", "kvtier.placement", frozenset(["ladder"]))
ADMISSION: Final = PolicyNames(
    "admission policy", "kvtier.admission", frozenset(["all", "second-touch", "tinylfu"])
)


def has_custom_policies(config: KvtierConfig) -> bool:
    """Return whether ``config`` names a policy that is not kvtier's own."""
    rules = config.placement
    evictions = {*config.shadow, *(tier.eviction for tier in config.tiers)}
    return not (
        evictions <= EVICTION.built_in
        and rules.policy in PLACEMENT.built_in
        and rules.admit in ADMISSION.built_in
    )
