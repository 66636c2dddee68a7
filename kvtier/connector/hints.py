"""What a request may ask of kvtier, in its ``kv_transfer_params``.

Whoever sends a request may know what no cache can see: that a tool will answer in a minute, or
that a prompt is never used again. ``{"kvtier": {...}}`` says it. What cannot be read is
ignored, field by field, and said once: a request is served without a wish rather than not at
all.

``kv_load_tiers`` is vLLM's own wish of this kind and names tiers by their nature. It is read as
vLLM reads it: a list of ``{"medium": ..., "locality": ...}``, of which one must fit; an entry
that cannot be read is left out, a list of nothing else allows any tier, an empty one none.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvtier.logs import get_logger
from kvtier.manager import NO_TERMS, RequestTerms

__all__ = [
    "HINTS_KEY",
    "LOAD_TIERS_KEY",
    "LONGEST_SESSION",
    "NO_HINTS",
    "HintReader",
    "RequestHints",
    "TierNature",
]

logger = get_logger(__name__)

HINTS_KEY: Final = "kvtier"
LOAD_TIERS_KEY: Final = "kv_load_tiers"
LONGEST_SESSION: Final = 256
"""Characters of a session's name."""

_MEDIA: Final = frozenset({"CPU", "STORAGE"})
_LOCALITIES: Final = frozenset({"LOCAL", "REMOTE"})
_SHOWN: Final = 80


class TierNature(NamedTuple):
    """What a request may call a tier.

    Attributes:
        name: Its name in the configuration.
        medium: ``CPU`` or ``STORAGE``, as in residency events.
        locality: ``LOCAL`` or ``REMOTE``.
    """

    name: str
    medium: str
    locality: str


@dataclass(frozen=True, slots=True)
class RequestHints:
    """One request's wishes.

    Attributes:
        retain_s: Seconds its chunks stay in RAM after a use, as far as the quota goes; None if
            it does not say.
        terms: What the manager is told of it.
    """

    retain_s: float | None = None
    terms: RequestTerms = NO_TERMS

    @property
    def stores_nothing(self) -> bool:
        """Whether its new chunks are not worth keeping at all."""
        return self.terms.store_tiers is not None and not self.terms.store_tiers


def _as_tuple(value: Any) -> Any:  # noqa: ANN401 - pydantic's contract
    return tuple(value) if isinstance(value, list) else value


_Tiers = Annotated[tuple[str, ...] | None, BeforeValidator(_as_tuple)]


class _Fields(BaseModel):
    """The fields of ``kvtier``; the page on request control describes them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    retain_s: float | None = Field(default=None, ge=0, le=7 * 86_400.0)
    skip_store: bool = False
    skip_load: bool = False
    load_tiers: _Tiers = None
    store_tiers: _Tiers = None
    session: str = Field(default="", max_length=LONGEST_SESSION)


_MOST_FIELDS: Final = 16
_MOST_ENTRIES: Final = 64
NO_HINTS: Final = RequestHints()
_NOWHERE: Final[frozenset[int]] = frozenset()


class HintReader:
    """Reads wishes, and says once for each field what was wrong with it.

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
            "session": f"write a text of at most {LONGEST_SESSION} characters",
        }

    def read(self, params: Mapping[str, Any] | None) -> RequestHints:
        """Return the wishes in a request's ``kv_transfer_params``, if there are any."""
        if not params:
            return NO_HINTS
        raw, natures = params.get(HINTS_KEY), params.get(LOAD_TIERS_KEY)
        if raw is None and natures is None:
            return NO_HINTS
        fields = _Fields() if raw is None else self._fields(raw)
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

    def _fields(self, raw: object) -> _Fields:
        """Return what can be read of ``raw``."""
        if not isinstance(raw, Mapping):
            remedy = 'write {"retain_s": 600}, or another field'
            self._warn(HINTS_KEY, raw, "not an object", remedy)
            return _Fields()
        if len(raw) > _MOST_FIELDS:
            self._warn(HINTS_KEY, "...", f"{len(raw)} fields", "write those you mean")
            return _Fields()
        fields = self._readable(raw)
        try:
            return _Fields.model_validate(fields)
        except ValidationError as error:
            for problem in error.errors(include_url=False):
                name = str(problem["loc"][0])
                if name in fields:
                    self._warn_of(name, fields.pop(name), problem["msg"])
        return _Fields.model_validate(fields)

    def _readable(self, raw: Mapping[Any, Any]) -> dict[str, Any]:
        """Return those of ``raw`` that have a field's name and are not too long to look at."""
        fields: dict[str, Any] = {}
        for key, value in raw.items():
            name = str(key)
            # Pydantic does not say which field has a name that is no valid text.
            if name not in self._remedies:
                self._warn_of(name, value, "no such field")
            # Before anything looks at every entry: a sender must not keep others waiting.
            elif isinstance(value, list | tuple | Mapping) and len(value) > _MOST_ENTRIES:
                self._warn_of(name, "...", f"{len(value)} entries")
            else:
                fields[name] = value
        return fields

    def _named(self, field: str, names: Sequence[str] | None) -> frozenset[int] | None:
        """Return the tiers called ``names``; None, for any, if one of them is none."""
        if names is None:
            return None
        numbers = frozenset(self._numbers[name] for name in names if name in self._numbers)
        if len(numbers) < len(set(names)):
            self._warn_of(field, names, "not all of these are tiers")
            return None
        return numbers

    def _natured(self, raw: object) -> frozenset[int] | None:
        """Return the tiers that fit one of vLLM's matchers; None for any."""
        if raw is None:
            return None
        if not isinstance(raw, list) or len(raw) > _MOST_ENTRIES:
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
            # Clients choose such names, so all of them count as one field, the object itself.
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
        shown = reprlib.repr(value)  # of a value that is nested too deep for repr, too
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}..."
        logger.warning(
            "a request's kv_transfer_params.%s = %s is ignored: %s; %s (said once)",
            place,
            shown,
            problem,
            remedy,
        )


def _common(*wishes: frozenset[int] | None) -> frozenset[int] | None:
    """Return the tiers that all wishes allow; None if there are none."""
    given = [wish for wish in wishes if wish is not None]
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
