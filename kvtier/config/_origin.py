"""Where a value was written, and the one shape every complaint about a value has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvtier.errors import ConfigError
from kvtier.printable import printable

__all__ = ["Origin"]

_LONGEST_VALUE = 60


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a configuration was written down, so that late errors still name file and line.

    It takes no part in comparisons: a value is the same value wherever it was written.

    Attributes:
        source: File name; empty for a configuration built in Python.
        lines: Line, from 1, of each key: ``tiers[1].capacity -> 8``.
        values: The text of each value, as written.
    """

    source: str = field(default="", compare=False)
    lines: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    values: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def line_of(self, key: str) -> int | None:
        """Return the line of ``key``, or of the innermost section around it that is written.

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
        """Return ``file:line: key = value: problem; remedy``, as much of it as is known.

        Args:
            key: Dotted key, as in ``tiers[1].capacity``; empty for the whole file.
            problem: What is wrong.
            remedy: What to do about it.
            value: Shown if the file does not spell the value out itself.

        >>> origin = Origin("a.yaml", {"transfer.piece": 9}, {"transfer.piece": "8M"})
        >>> origin.format_problem("transfer.piece", "'M' is not a unit", "write 8MiB")
        "a.yaml:9: transfer.piece = 8M: 'M' is not a unit; write 8MiB"
        """
        place = self.locate(key, value=value)
        return f"{place}: {problem}; {remedy}" if place else f"{problem}; {remedy}"

    @contextmanager
    def at(self, key: str) -> Iterator[None]:
        """Put ``key`` and where it is in front of a ConfigError that is raised in here."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{self.locate(key)}: {error}") from error

    def locate(self, key: str, *, value: object = None) -> str:
        """Return ``file:line: key = value``, as much of it as is known."""
        line = self.line_of(key)
        file = f"{self.source}:{line}" if line else self.source
        shown = self.values.get(key, "" if value is None else str(value))
        if len(shown) > _LONGEST_VALUE:
            shown = f"{shown[:_LONGEST_VALUE]}..."
        subject = f"{key} = {shown}" if shown else key
        return printable(": ".join(part for part in (file, subject) if part))
