"""Request hints: the ``kvtier`` object in a request's ``kv_transfer_params``.

A client may know more than a cache: for example, that a tool will answer in a minute, or that a
prompt is never used again. ``{"kvtier": {...}}`` passes this knowledge to kvtier. An unreadable
field is ignored and logged once; the request is served without it.

``kv_load_tiers`` is a hint of vLLM's own, which selects tiers by medium and locality. kvtier
reads it as vLLM does: a list of ``{"medium": ..., "locality": ...}``. A tier is allowed if an
entry matches the tier. Unreadable entries are ignored. A list of only unreadable entries allows
every tier; an empty list allows none.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvtier.logs import get_logger
from kvtier.policies.base import NO_TERMS, RequestTerms

__all__ = [
    "HINTS_KEY",
    "LOAD_TIERS_KEY",
    "MAX_SESSION_CHARS",
    "NO_HINTS",
    "HintReader",
    "RequestHints",
    "TierNature",
]

logger = get_logger(__name__)

HINTS_KEY: Final = "kvtier"
LOAD_TIERS_KEY: Final = "kv_load_tiers"
MAX_SESSION_CHARS: Final = 256

_MEDIA: Final = frozenset({"CPU", "STORAGE"})
_LOCALITIES: Final = frozenset({"LOCAL", "REMOTE"})
_SHOWN_CHARS: Final = 80


class TierNature(NamedTuple):
    """The properties by which hints name a tier.

    Attributes:
        name: The tier's name in the configuration.
        medium: ``CPU`` or ``STORAGE``, as in residency events.
        locality: ``LOCAL`` or ``REMOTE``.
    """

    name: str
    medium: str
    locality: str


@dataclass(frozen=True, slots=True)
class RequestHints:
    """The hints of one request.

    Attributes:
        retain_s: Seconds for which the request's chunks stay in RAM after a use, within the
            quota; None for the configured time.
        terms: The tiers that the request may use, and its session.
    """

    retain_s: float | None = None
    terms: RequestTerms = NO_TERMS


def _as_tuple(value: Any) -> Any:  # noqa: ANN401 - pydantic's contract
    return tuple(value) if isinstance(value, list) else value


_Tiers = Annotated[tuple[str, ...] | None, BeforeValidator(_as_tuple)]


class _HintFields(BaseModel):
    """The ``kvtier`` object in a request's ``kv_transfer_params``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    retain_s: float | None = Field(default=None, ge=0, le=7 * 86_400.0)
    skip_store: bool = False
    skip_load: bool = False
    load_tiers: _Tiers = None
    store_tiers: _Tiers = None
    session: str = Field(default="", max_length=MAX_SESSION_CHARS)


_MAX_FIELDS: Final = 16
_MAX_ENTRIES: Final = 64
NO_HINTS: Final = RequestHints()
_NOWHERE: Final[frozenset[int]] = frozenset()


class HintReader:
    """Reads hints, and logs the first error in each field.

    Args:
        tiers: The tiers, fastest first.
    """

    def __init__(self, tiers: Sequence[TierNature]) -> None:
        self._tiers = tuple(tiers)
        self._numbers = {tier.name: number for number, tier in enumerate(tiers)}
        self._warned: set[str] = set()
        names = ", ".join(self._numbers)
        tier_list = f"write a list of tiers, of {names}"
        self._remedies = {
            "retain_s": "write seconds, at most 604800",
            "skip_store": "write true or false",
            "skip_load": "write true or false",
            "load_tiers": tier_list,
            "store_tiers": tier_list,
            "session": f"write a text of at most {MAX_SESSION_CHARS} characters",
        }

    def read(self, params: Mapping[str, Any] | None) -> RequestHints:
        """Return the hints in a request's ``kv_transfer_params``."""
        if not params:
            return NO_HINTS
        raw, natures = params.get(HINTS_KEY), params.get(LOAD_TIERS_KEY)
        if raw is None and natures is None:
            return NO_HINTS
        fields = _HintFields() if raw is None else self._fields(raw)
        terms = RequestTerms(
            load_tiers=_common(
                _NOWHERE if fields.skip_load else None,
                self._named("load_tiers", fields.load_tiers),
                self._natured(natures),
            ),
            store_tiers=_common(
                _NOWHERE if fields.skip_store else None,
                self._named("store_tiers", fields.store_tiers),
            ),
            session=fields.session,
        )
        return RequestHints(fields.retain_s, terms)

    def _fields(self, raw: object) -> _HintFields:
        """Return the valid fields of ``raw``; warn about the others."""
        if not isinstance(raw, Mapping):
            remedy = 'write {"retain_s": 600}, or another field'
            self._warn(HINTS_KEY, raw, "not an object", remedy)
            return _HintFields()
        if len(raw) > _MAX_FIELDS:
            self._warn(HINTS_KEY, "...", f"{len(raw)} fields", "write those you mean")
            return _HintFields()
        fields = self._readable(raw)
        try:
            return _HintFields.model_validate(fields)
        except ValidationError as error:
            for problem in error.errors(include_url=False):
                name = str(problem["loc"][0])
                if name in fields:
                    self._warn_of(name, fields.pop(name), problem["msg"])
        return _HintFields.model_validate(fields)

    def _readable(self, raw: Mapping[Any, Any]) -> dict[str, Any]:
        """Return the entries with a known name and a short value; warn about the others."""
        fields: dict[str, Any] = {}
        for key, value in raw.items():
            name = str(key)
            # Pydantic cannot report a field whose name is invalid text.
            if name not in self._remedies:
                self._warn_of(name, value, "no such field")
            # This precedes the checks of entries, so that one client cannot delay the others.
            elif isinstance(value, list | tuple | Mapping) and len(value) > _MAX_ENTRIES:
                self._warn_of(name, "...", f"{len(value)} entries")
            else:
                fields[name] = value
        return fields

    def _named(self, field: str, names: Sequence[str] | None) -> frozenset[int] | None:
        """Return the tier indices of ``names``; None (no limit) if a name is unknown."""
        if names is None:
            return None
        numbers = frozenset(self._numbers[name] for name in names if name in self._numbers)
        if len(numbers) < len(set(names)):
            self._warn_of(field, names, "not all of these are tiers")
            return None
        return numbers

    def _natured(self, raw: object) -> frozenset[int] | None:
        """Return the tiers that match an entry of the list ``raw``; None for all tiers."""
        if raw is None:
            return None
        if not isinstance(raw, list) or len(raw) > _MAX_ENTRIES:
            self._warn_of_natures(raw)
            return None
        matchers = [entry for entry in raw if _is_matcher(entry)]
        if len(matchers) < len(raw):
            self._warn_of_natures(raw)
        if raw and not matchers:
            return None
        return frozenset(
            number
            for number, tier in enumerate(self._tiers)
            if any(_fits(tier, matcher) for matcher in matchers)
        )

    def _warn_of_natures(self, raw: object) -> None:
        remedy = (
            'write a list of {"medium": "CPU" or "STORAGE", "locality": "LOCAL" or "REMOTE"}'
        )
        self._warn(LOAD_TIERS_KEY, raw, "not all of it can be read", remedy)

    def _warn_of(self, field: str, value: object, problem: str) -> None:
        remedy = self._remedies.get(field)
        if remedy is None:
            # Clients choose unknown names, so all of them count as one field.
            known = ", ".join(self._remedies)
            self._warn(
                f"{HINTS_KEY}.*", {field: value}, "no such field", f"write one of {known}"
            )
        else:
            self._warn(f"{HINTS_KEY}.{field}", value, problem, remedy)

    def _warn(self, place: str, value: object, problem: str, remedy: str) -> None:
        if place in self._warned:
            return
        self._warned.add(place)
        shown = reprlib.repr(value)  # repr may fail for a deeply nested value
        if len(shown) > _SHOWN_CHARS:
            shown = f"{shown[:_SHOWN_CHARS]}..."
        logger.warning(
            "a request's kv_transfer_params.%s = %s is ignored: %s; %s (logged once)",
            place,
            shown,
            problem,
            remedy,
        )


def _common(*limits: frozenset[int] | None) -> frozenset[int] | None:
    """Return the tiers that all limits allow; None if every limit is None."""
    given = [limit for limit in limits if limit is not None]
    return frozenset.intersection(*given) if given else None


def _is_matcher(entry: object) -> bool:
    return isinstance(entry, Mapping) and all(
        value is None or (isinstance(value, str) and value.upper() in known)
        for value, known in _words(entry)
    )


def _fits(tier: TierNature, matcher: Mapping[str, Any]) -> bool:
    natures = (tier.medium, tier.locality)
    return all(
        value is None or value.upper() == nature
        for (value, _), nature in zip(_words(matcher), natures, strict=True)
    )


def _words(matcher: Mapping[str, Any]) -> Iterable[tuple[Any, frozenset[str]]]:
    return (matcher.get("medium"), _MEDIA), (matcher.get("locality"), _LOCALITIES)
