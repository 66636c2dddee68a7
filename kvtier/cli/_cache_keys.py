"""Keys as people write them: hex, the beginning of it, and ``/GROUP`` as in the log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from kvtier.errors import ConfigError
from kvtier.keys import (
    ADAPTER_OFFSET,
    GROUP_NBYTES,
    ChunkKey,
    group_of,
    strip_adapter,
)
from kvtier.tiers.slab.removals import LIKELY_GROUPS, MARKED_NBYTES, MarkPattern

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
                f"{text!r} is not a key; write 8 or more hex digits, as ls and the log show"
            )
        return cls(match[1].lower(), None if match[2] is None else int(match[2]))

    @property
    def common_digits(self) -> str:
        """What every key that is meant begins with, with an adapter in it or without."""
        return self.digits[: 2 * ADAPTER_OFFSET]

    def matches(self, key: ChunkKey) -> bool:
        """Return whether ``key`` is meant, as it is or as the engine knows it.

        The engine's keys and events have no digest of an adapter, as :mod:`kvtier.keys` says.
        """
        forms = (key.hex(), strip_adapter(key).hex())
        begins = any(form.startswith(self.digits) for form in forms)
        return begins and self.group in {None, group_of(key)}

    def of_marks(self) -> MarkPattern:
        """Return the pattern for the removal log, which has marks and no keys.

        A key that is written whole ends in its group. Of block hashes that are not, one in 16
        million ends like a group, and is taken for a key.
        """
        group, digits = self.group, self.digits
        if group is None and len(digits) >= 2 * (MARKED_NBYTES + GROUP_NBYTES):
            last = int(digits[-2 * GROUP_NBYTES :], 16)
            group = last if last < LIKELY_GROUPS else None
        return MarkPattern(digits, group)
