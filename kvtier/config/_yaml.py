"""Parses YAML into plain values, with the line of each value.

The dialect is a subset of YAML 1.2. In YAML 1.1 ``off`` is false, ``1:30`` is ninety and
``010`` is eight. In this dialect ``off`` and ``1:30`` are text and ``010`` is ten, as in
editors with YAML 1.2 and in the JSON Schema. Aliases and tags are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import yaml
from yaml.reader import ReaderError

from kvtier.errors import ConfigError
from kvtier.printable import printable

__all__ = ["Document", "Origin", "read_yaml"]

_DEEPEST = 16
_LONGEST_VALUE = 60
_LONGEST_PROBLEM = 500
_TAG: Final = "tag:yaml.org,2002:"
_PARSERS: Final[dict[str, Callable[[str], Any]]] = {
    f"{_TAG}null": lambda _: None,
    f"{_TAG}bool": lambda text: text.lower() == "true",
    f"{_TAG}int": int,
    f"{_TAG}float": float,
    f"{_TAG}str": str,
}


@dataclass(frozen=True, slots=True)
class Origin:
    """The file of a configuration, and each key's line and text, for error messages.

    Equal configurations may have different origins, so comparisons ignore the origin.

    Attributes:
        source: File name; empty for a configuration built in Python.
        lines: Line number of each key, from 1, such as ``{"tiers[1].capacity": 8}``.
        values: The text of each value, as written.
    """

    source: str = field(default="", compare=False)
    lines: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    values: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def line_of(self, key: str) -> int | None:
        """Return the line of ``key``, else of the innermost section around it, else None.

        >>> Origin("a.yaml", {"transfer": 4}).line_of("transfer.piece")
        4
        """
        while key not in self.lines:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
            if not key:
                return None
        return self.lines[key]

    def format_problem(
        self, key: str, problem: str, remedy: str, *, value: object = None
    ) -> str:
        """Return ``file:line: key = value: problem; remedy``. Omit what is unknown.

        Args:
            key: Dotted key, as in ``tiers[1].capacity``; empty for the whole file.
            problem: The problem.
            remedy: What the user can do.
            value: The value to show if the file does not contain ``key``.

        >>> origin = Origin("a.yaml", {"transfer.piece": 9}, {"transfer.piece": "8M"})
        >>> origin.format_problem("transfer.piece", "'M' is not a unit", "write 8MiB")
        "a.yaml:9: transfer.piece = 8M: 'M' is not a unit; write 8MiB"
        """
        place = self.locate(key, value=value)
        problem = _cut(problem, _LONGEST_PROBLEM)
        return f"{place}: {problem}; {remedy}" if place else f"{problem}; {remedy}"

    @contextmanager
    def at(self, key: str) -> Iterator[None]:
        """Prefix a ConfigError of the ``with`` block with the file and line of ``key``."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{self.locate(key)}: {error}") from error

    def locate(self, key: str, *, value: object = None) -> str:
        """Return ``file:line: key = value``. Omit what is unknown."""
        line = self.line_of(key)
        file = f"{self.source}:{line}" if line else self.source
        key, shown = _cut(key), _cut(self.values.get(key, "" if value is None else str(value)))
        subject = f"{key} = {shown}" if shown else key
        return printable(": ".join(part for part in (file, subject) if part))


def _cut(text: str, length: int = _LONGEST_VALUE) -> str:
    return f"{text[:length]}..." if len(text) > length else text


@dataclass(slots=True)
class Document:
    """The parsed values of a YAML file, and where each value is in the file.

    Attributes:
        values: Dicts, lists and scalars.
        origin: The line and the text of each key.
    """

    values: dict[str, Any]
    origin: Origin


def read_yaml(text: str, *, source: str) -> Document:
    """Read ``text``, the content of the file ``source``.

    Raises:
        ConfigError: The text is not YAML, is empty, has no mapping at the top, or has a key
            twice.
    """
    _refuse_tabs(text, source)
    node = _compose(text, source)
    if node is None:
        hint = "name at least one tier, such as {kind: ram, capacity: 4GiB} under tiers:"
        raise ConfigError(Origin(source).format_problem("", "the file is empty", hint))
    reader = _Reader(source)
    values = reader.read(node, "")
    if not isinstance(values, dict):
        hint = "start with tiers:"
        raise ConfigError(Origin(source).format_problem("", "the file is not a mapping", hint))
    return Document(values, Origin(source, reader.lines, reader.texts))


class _Loader(yaml.SafeLoader):
    """A YAML loader that converts null, true, false and decimal numbers; the rest is text."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:  # noqa: ANN401 - PyYAML's contract
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            self._refuse("an alias", "write the value out", event.start_mark)
        if getattr(event, "tag", None) is not None:
            self._refuse("a tag", "write the plain value", event.start_mark)
        if self._depth >= _DEEPEST:
            self._refuse("nested too deep", "no section goes that deep", event.start_mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    @staticmethod
    def _refuse(problem: str, remedy: str, mark: Any) -> None:  # noqa: ANN401 - two classes in the stubs
        raise yaml.MarkedYAMLError(problem=f"{problem}; {remedy}", problem_mark=mark)


for _name, _pattern, _first in (
    ("null", r"(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"[-+]?[0-9]{1,18}$", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)$", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"{_TAG}{_name}", re.compile(_pattern, re.ASCII), _first)


@dataclass(slots=True)
class _Reader:
    """Converts YAML nodes to plain values, and records the line and the text of each key."""

    source: str
    lines: dict[str, int] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def read(self, node: yaml.Node, key: str) -> Any:  # noqa: ANN401 - any YAML value
        if key:
            self.lines.setdefault(key, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, f"{key}[{at}]") for at, item in enumerate(node.value)]
        self.texts[key] = node.value
        return _PARSERS[node.tag](node.value)

    def _mapping(self, node: yaml.MappingNode, key: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name_node, value_node in node.value:
            name, line = name_node.value, name_node.start_mark.line + 1
            if not isinstance(name, str) or not name:
                remedy = "write a word and a colon"
                raise ConfigError(f"{self.source}:{line}: a key that is not a word; {remedy}")
            dotted = f"{key}.{name}" if key else name
            if name in values:
                first = self.lines[dotted]
                remedy = f"it is on line {first} already: keep one"
                place = f"{self.source}:{line}: {printable(_cut(dotted))}"
                raise ConfigError(f"{place}: written twice; {remedy}")
            self.lines[dotted] = line
            values[name] = self.read(value_node, dotted)
        return values


def _refuse_tabs(text: str, source: str) -> None:
    """Refuse tabs in indentation, because PyYAML may add such a line to the value above."""
    for number, line in enumerate(text.splitlines(), start=1):
        indent = line[: len(line) - len(line.lstrip())]
        if "\t" in indent and line.strip() and not line.lstrip().startswith("#"):
            problem = f"{_cut(line.strip())!r} is indented with a tab; indent with spaces"
            raise ConfigError(f"{source}:{number}: {problem}")


def _compose(text: str, source: str) -> yaml.Node | None:
    try:
        loader = _Loader(text)
        try:
            node: yaml.Node | None = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax(error, text, source)) from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"{chr(error.character)!r} may not be in YAML"
        raise ConfigError(f"{source}:{line}: {problem}; remove it") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        problem = f"not YAML: {str(error).splitlines()[0]}"
        raise ConfigError(f"{source}: {problem}; write the file as plain UTF-8 text") from error
    return node


def _syntax(error: yaml.MarkedYAMLError, text: str, source: str) -> str:
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return f"{source}: not YAML: {error.problem}; compare it with kvtier example"
    written = text.splitlines()[mark.line].strip() if mark.line < len(text.splitlines()) else ""
    place = f"{source}:{mark.line + 1}"
    if written:
        place += f": {_cut(written)!r}"
    problem = _cut(error.problem or "not YAML", _LONGEST_PROBLEM)
    if "\\t" in problem:
        problem = "a tab where YAML wants spaces"
    if ";" in problem:
        return f"{place}: {problem}"
    return f"{place}: {problem}; check the colons, dashes and indentation there"
