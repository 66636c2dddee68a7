"""Reads a file into a :class:`KvtierConfig`, or raises one error with a line per problem.

Sections are validated one by one, so a problem in one section does not hide the problems in
another. Every problem is a line of the form ``file:line: key = value: problem; remedy``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from kvtier.config._kinds import TIERS, options_of
from kvtier.config._models import KvtierConfig
from kvtier.config._tiers import NAME_PATTERN, TierConfig
from kvtier.config._yaml import Origin, read_yaml
from kvtier.errors import ConfigError, did_you_mean
from kvtier.named_classes import CLASS_PATTERN, NamedClasses
from kvtier.policies.registry import (
    ADMISSIONS,
    EVICTIONS,
    PLACEMENTS,
    PolicyRole,
)
from kvtier.printable import printable
from kvtier.units import UnitError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = ["load_config", "parse_config", "parse_tier"]

ModelT = TypeVar("ModelT", bound=BaseModel)
TierT = TypeVar("TierT", bound=TierConfig)

_EXAMPLES: Final = {
    "tiers": "tiers: [{kind: ram, capacity: 4GiB}]",
    "kind": "kind: ram",
    "capacity": "capacity: 64GiB",
    "path": "path: /var/lib/kvtier",
}


def load_config(path: Path | str) -> KvtierConfig:
    """Read the file at ``path``.

    This function only reads the file; :func:`kvtier.doctor.examine` examines the machine.

    Raises:
        ConfigError: The file cannot be read or is invalid. The message has one line per
            problem.
    """
    source = printable(str(path))
    raw = _read_file(path, source)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{source}:{line}: not UTF-8 text; save it as UTF-8") from error
    return parse_config(text, source=source)


def _read_file(path: Path | str, source: str) -> bytes:
    """Return the content of the file at ``path``. Errors name the file ``source``."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(_MOST_NBYTES + 1)
    except FileNotFoundError as error:
        remedy = "check the path; kvtier example > kvtier.yaml makes a file to start from"
        raise ConfigError(f"{source}: no such file; {remedy}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{source}: is a directory; name a file in it") from error
    except OSError as error:
        remedy = "check its permissions"
        raise ConfigError(f"{source}: cannot be read: {error.strerror}; {remedy}") from error
    if len(raw) > _MOST_NBYTES:
        problem = f"larger than {_MOST_NBYTES >> 10} KiB, too large for a configuration"
        raise ConfigError(f"{source}: {problem}; check the path")
    return raw


def parse_config(text: str, *, source: str) -> KvtierConfig:
    """Parse the content of a configuration file.

    Args:
        text: The content.
        source: Name of the file in errors.

    Raises:
        ConfigError: The text is invalid. The message has one line per problem.
    """
    document = read_yaml(text, source=source)
    return _Reader(document.origin).read(document.values)


def parse_tier(text: str, options: type[TierT], *, source: str) -> TierT:
    """Parse ``text``, the keys of one tier.

    Args:
        text: YAML with the keys of one entry of ``tiers``.
        options: The pydantic model for the keys.
        source: Name of the text in errors.

    Raises:
        ConfigError: The text is invalid. The message has one line per problem.
    """
    document = read_yaml(text, source=source)
    return _Reader(document.origin).read_tier(document.values, options)


@dataclass(slots=True)
class _Reader:
    """Converts plain values to the configuration's models, and collects all problems."""

    origin: Origin
    problems: list[tuple[int, Callable[[], str]]] = field(default_factory=list)
    """Line number of each problem, and a function that returns the text of the problem."""

    def read(self, values: dict[str, Any]) -> KvtierConfig:
        sections = KvtierConfig.model_fields
        for name in values:
            if name not in sections:
                self._unknown(name, name, sections)
        read: dict[str, Any] = {"tiers": self._tiers(values.get("tiers", _MISSING))}
        if "shadow" in values:
            read["shadow"] = self._shadows(values["shadow"])
        self._check_placement(values.get("placement"))
        for name, info in sections.items():
            if name in values and name != "tiers" and isinstance(info.annotation, type):
                read[name] = self._section(info.annotation, values[name], name)
        # Rules across sections are checked only if each section is valid.
        config = None if self.problems else self._validate(KvtierConfig, read, "")
        if config is None:
            raise self._refusal()
        return config

    def _tiers(self, values: object) -> list[TierConfig | None]:
        if values is _MISSING:
            self._note("tiers", "missing", f"add {_EXAMPLES['tiers']}")
            return []
        if not isinstance(values, list) or not values:
            self._note("tiers", "not a list of tiers", f"write {_EXAMPLES['tiers']}")
            return []
        return [self._tier(value, f"tiers[{at}]") for at, value in enumerate(values)]

    def _shadows(self, values: object) -> object:
        if not isinstance(values, list):
            self._note("shadow", "not a list of policies", "write shadow: [arc, s3-fifo]")
            return []
        for at, name in enumerate(values):
            self._check_policy(name, EVICTIONS, f"shadow[{at}]")
        return values

    def _check_placement(self, values: object) -> None:
        if isinstance(values, dict):
            self._check_policy(values.get("policy"), PLACEMENTS, "placement.policy")
            self._check_policy(values.get("admit"), ADMISSIONS, "placement.admit")

    def _tier(self, values: object, key: str) -> TierConfig | None:
        if not isinstance(values, dict):
            self._note(key, "not a tier", "write {kind: ram, capacity: 4GiB}")
            return None
        if "kind" not in values:
            self._note(f"{key}.kind", "missing", f"add {_EXAMPLES['kind']}")
            return None
        self._check_policy(values.get("eviction"), EVICTIONS, f"{key}.eviction")
        kind = values["kind"]
        if not self._check_name(kind, TIERS, f"{key}.kind"):
            return None
        with self.origin.at(f"{key}.kind"):
            options = options_of(kind)
        return self._section(options, values, key)

    def _check_policy(self, name: object, role: PolicyRole[Any], key: str) -> None:
        if isinstance(name, str):  # else absent, or refused by the validation of its section
            self._check_name(name, role, key)

    def _check_name(self, name: object, classes: NamedClasses, key: str) -> bool:
        """Return whether ``name`` names one of ``classes`` that can be imported.

        If not, add a problem.
        """
        is_known = isinstance(name, str) and (
            name in classes.built_in or re.fullmatch(CLASS_PATTERN, name) is not None
        )
        known = () if is_known else classes.installed()  # listing them takes 10 ms or more
        if not is_known and name not in known:
            remedy = f"installed: {', '.join(known)}{did_you_mean(str(name), known)}"
            self._note(key, f"no such {classes.what} is installed", remedy)
            return False
        obstacle = classes.obstacle(str(name))
        if obstacle is not None:
            self._note(key, *obstacle)
        return obstacle is None

    def read_tier(self, values: dict[str, Any], options: type[TierT]) -> TierT:
        """Read the section of one tier."""
        section = self._section(options, values, "")
        if section is None:
            raise self._refusal()
        return section

    def _section(self, model: type[ModelT], values: object, key: str) -> ModelT | None:
        if isinstance(values, dict):
            # As JSON: a strict model converts text to a path or an enumeration only from JSON.
            return self._validate(model, json.dumps(values), key)
        names = ", ".join(_names(model))
        self._note(key, "not a section", f"put keys below it, or leave it out; keys: {names}")
        return None

    def _validate(
        self, model: type[ModelT], values: dict[str, Any] | str, key: str
    ) -> ModelT | None:
        """Build a ``model`` from ``values``. If invalid, add to ``problems`` and return None.

        ``values`` is JSON text or a dict of validated models.
        """
        context = {"origin": self.origin}
        try:
            if isinstance(values, str):
                return model.model_validate_json(
                    values, context=context, by_alias=True, by_name=False
                )
            return model.model_validate(values, context=context, by_alias=True, by_name=False)
        except ValidationError as error:
            for details in error.errors(include_url=False):
                self._explain(details, model, key)
            return None

    def _explain(self, details: ErrorDetails, model: type[BaseModel], prefix: str) -> None:
        context = details.get("ctx", {})
        key = _join(prefix, (*details["loc"], *((context["key"],) if "key" in context else ())))
        if details["type"] == "extra_forbidden":
            names = _names(model) if len(details["loc"]) == 1 else ()
            self._unknown(key, str(details["loc"][-1]), names)
        elif details["type"] == "missing":
            name = str(details["loc"][-1])
            self._note(key, "missing", f"add {_EXAMPLES.get(name, f'{name}:')}")
        elif details["type"] != "default_factory_not_called":  # pydantic reports the cause too
            self._note(key, *_describe(details))

    def _unknown(self, key: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)

        def words() -> str:
            close = did_you_mean(name, known).removeprefix("; ")
            remedy = close or f"known: {', '.join(known)}"
            return self.origin.format_problem(key, "unknown key", remedy)

        self.problems.append((self.origin.line_of(key) or 0, words))

    def _note(self, key: str, problem: str, remedy: str) -> None:
        words = partial(self.origin.format_problem, key, problem, remedy)
        self.problems.append((self.origin.line_of(key) or 0, words))

    def _refusal(self) -> ConfigError:
        in_file_order = sorted(self.problems, key=lambda problem: problem[0])
        lines = [words() for _, words in in_file_order[:_MOST_PROBLEMS]]
        if more := len(in_file_order) - len(lines):
            lines.append(f"{self.origin.source}: {more:,} more problems; fix these first")
        return ConfigError("\n".join(lines))


_MISSING: Final = object()
_MOST_PROBLEMS: Final = 20
_MOST_NBYTES: Final = 256 << 10


def _names(model: type[BaseModel]) -> list[str]:
    """Return the names that a file uses for the fields of ``model``."""
    fields = model.model_fields.items()
    return [str(info.validation_alias or name) for name, info in fields]


def _join(prefix: str, location: Iterable[object]) -> str:
    key = prefix
    for step in location:
        key += f"[{step}]" if isinstance(step, int) else f".{step}" if key else str(step)
    return key


_BOUNDS: Final = {
    "greater_than": ("gt", "not more than", "write more than"),
    "greater_than_equal": ("ge", "less than", "write at least"),
    "less_than": ("lt", "not less than", "write less than"),
    "less_than_equal": ("le", "more than", "write at most"),
}
_TYPES: Final = {
    "int_type": ("not a whole number", "write one such as 4, without quotes"),
    "bool_type": ("not true or false", "write true or false"),
    "string_type": ("not text", "put it in quotes if it is meant as text"),
    "path_type": ("not a path", "write one such as /var/lib/kvtier"),
}
_NOT_A_NAME: Final = (
    "not a name kvtier can use in logs and metrics",
    "start with a letter a-z and go on with a-z, 0-9, _ or -",
)


def _describe(details: ErrorDetails) -> tuple[str, str]:
    """Return the problem and the remedy of a pydantic error."""
    kind, context = details["type"], details.get("ctx", {})
    if isinstance(context.get("error"), UnitError):
        return context["error"].problem, context["error"].remedy
    if "remedy" in context:
        return context["problem"], context["remedy"]
    if kind in _BOUNDS:
        bound, problem, remedy = _BOUNDS[kind]
        return f"{problem} {context[bound]:g}", f"{remedy} {context[bound]:g}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        hint = did_you_mean(str(details["input"]), choices)
        return "not a choice", f"write {' or '.join(choices)}{hint}"
    is_name = context.get("pattern") == NAME_PATTERN
    return _NOT_A_NAME if is_name else _TYPES.get(kind, (details["msg"], "see kvtier schema"))
