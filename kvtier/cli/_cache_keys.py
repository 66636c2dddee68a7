"""Keys as people write them: hex, the beginning of it, and ``/GROUP`` as in the log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Self

from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey, group_of, make_key

__all__ = ["KeyPattern"]

_PATTERN: Final = re.compile(r"([0-9a-fA-F]{8,})(?:/([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True)
class KeyPattern:
    """Which keys are meant.

    Attributes:
        digits: How the key begins, in lower-case hex.
        group: Its KV cache group; None for any.
    """

    digits: str
    group: int | None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a key as :func:`kvtier.keys.short` or ``bytes.hex`` writes it, or its beginning.

        Raises:
            ConfigError: It is not one.

        >>> KeyPattern.parse("00010203ab/2")
        KeyPattern(digits='00010203ab', group=2)
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"{text!r} is not a key; write 8 or more hex digits, such as the log shows"
            )
        return cls(match[1].lower(), None if match[2] is None else int(match[2]))

    def matches(self, key: ChunkKey) -> bool:
        """Return whether ``key`` is meant."""
        return key.hex().startswith(self.digits) and self.group in {None, group_of(key)}

    def whole_keys(self) -> Iterator[ChunkKey]:
        """Yield the keys that would be meant if nothing were left out."""
        if len(self.digits) % 2:
            return
        if self.group is None:
            yield bytes.fromhex(self.digits)
        else:
            yield make_key(bytes.fromhex(self.digits), self.group)
