"""``kvtier cache`` as a shell runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from kvtier.cli import main
from tests.unit.stores import KEYS

ROOT: Final = Path(__file__).parents[2]
READING: Final = [["stat"], ["ls"], ["verify"], ["explain", KEYS[0].hex()]]
CHANGING: Final = [["evict", "--all", "--yes"], ["compact-index"]]


class Ran(NamedTuple):
    """What a command left behind."""

    code: int | str | None
    out: str
    err: str


class Shell:
    """Runs ``kvtier cache`` in this process."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Ran:
        self._monkeypatch.setattr(sys, "argv", ["kvtier", "cache", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return Ran(caught.value.code, *self._capsys.readouterr())

    def json(self, *arguments: object, code: int = 0) -> Any:
        ran = self(*arguments, "--json")
        assert (ran.code, ran.err) == (code, "")
        return json.loads(ran.out)


def flat(text: str) -> str:
    """Return ``text`` without the line breaks and blanks that a table's width puts in."""
    return " ".join(text.split())
