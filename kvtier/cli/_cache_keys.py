"""Parses chunk keys from the command line: leading hex digits, then optionally ``/GROUP``.

A file of keys has one key per line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from kvtier.errors import ConfigError
from kvtier.keys import ADAPTER_OFFSET, GROUP_NBYTES, ChunkKey, group_of, strip_adapter
from kvtier.printable import printable
from kvtier.tiers.slab.removals import LIKELY_GROUPS, MARKED_NBYTES, MarkPattern

__all__ = ["KeyList", "KeyPattern"]

_PATTERN: Final = re.compile(r"([0-9a-fA-F]{8,})(?:/([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True)
class KeyPattern:
    """A pattern that matches keys by their first digits and their KV cache group.

    Attributes:
        digits: First digits of the key, in lower-case hex.
        group: The key's KV cache group; None for any group.
    """

    digits: str
    group: int | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a whole key or its first digits, as written by ``bytes.hex`` or ``short_key``.

        Raises:
            ConfigError: The text is not a key.

        >>> KeyPattern.parse("00010203ab/2")
        KeyPattern(digits='00010203ab', group=2)
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"{text!r} is not a key; write 8 or more hex digits, as ls and the log show"
            )
        return cls(match[1].lower(), None if match[2] is None else int(match[2]))

    @property
    def common_digits(self) -> str:
        """Return the digits that all matching keys begin with, up to the adapter digest."""
        return self.digits[: 2 * ADAPTER_OFFSET]

    def matches(self, key: ChunkKey) -> bool:
        """Return whether the pattern matches ``key``, or ``key`` without the adapter digest.

        In the engine and in its events, keys have no adapter digest.
        """
        forms = (key.hex(), strip_adapter(key).hex())
        begins = any(form.startswith(self.digits) for form in forms)
        return begins and self.group in {None, group_of(key)}

    def of_marks(self) -> MarkPattern:
        """Return a pattern for marks, the short forms of keys in the removal log.

        Digits that end with a likely group number count as a whole key. Other digits count as
        a block hash. One block hash in 67 million is mistaken for a whole key.
        """
        group, digits = self.group, self.digits
        if group is None and len(digits) >= 2 * (MARKED_NBYTES + GROUP_NBYTES):
            last = int(digits[-2 * GROUP_NBYTES :], 16)
            group = last if last < LIKELY_GROUPS else None
        return MarkPattern(digits, group)


class KeyList:
    """The keys of a file. :meth:`take` finds a key in the list and marks it as taken.

    ``patterns`` has each key's pattern, of at least 16 digits, by its text in the file.
    """

    def __init__(self, patterns: dict[str, KeyPattern]) -> None:
        self._missing = dict.fromkeys(patterns)
        self._patterns: dict[str, list[tuple[str, KeyPattern]]] = {}
        for text, pattern in patterns.items():
            self._patterns.setdefault(pattern.common_digits, []).append((text, pattern))

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a file with a key per line; empty lines are skipped.

        Raises:
            ConfigError: The file cannot be read, or a line is not a key of 16 digits or more.
        """
        try:
            lines = file.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            problem = getattr(error, "strerror", None) or "not text"
            raise ConfigError(
                f"{printable(str(file))}: {problem}; name a file with a key per line"
            ) from error
        patterns = {}
        for number, line in enumerate(map(str.strip, lines), start=1):
            if line:
                patterns[line] = _parse_line(f"{printable(str(file))}:{number}", line)
        return cls(patterns)

    def take(self, key: ChunkKey) -> bool:
        """Return whether the list has ``key``; if so, mark ``key`` as taken."""
        listed = self._patterns.get(key[:ADAPTER_OFFSET].hex(), ())
        matching = [text for text, pattern in listed if pattern.matches(key)]
        for text in matching:
            self._missing.pop(text, None)
        return bool(matching)

    def missing(self) -> list[str]:
        """Return the keys that were not taken."""
        return list(self._missing)


def _parse_line(where: str, line: str) -> KeyPattern:
    try:
        pattern = KeyPattern.parse(line)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if len(pattern.digits) < 2 * ADAPTER_OFFSET:
        raise ConfigError(f"{where}: {line} is too short; write 16 digits or more, as ls does")
    return pattern
