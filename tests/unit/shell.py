"""``kvtier`` as a shell runs it."""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import pytest

from kvtier.cli import main

__all__ = ["Ran", "Shell"]


class Ran(NamedTuple):
    """What a command left behind."""

    code: int | str | None
    out: str
    err: str


class Shell:
    """Runs the commands of ``kvtier``, or of a group of them, in this process."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        *group: str,
    ) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self._command = ("kvtier", *group)

    def __call__(self, *arguments: object) -> Ran:
        self._monkeypatch.setattr(sys, "argv", [*self._command, *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return Ran(caught.value.code, *self._capsys.readouterr())

    def json(self, *arguments: object, code: int = 0) -> Any:
        ran = self(*arguments, "--json")
        assert (ran.code, ran.err) == (code, "")
        return json.loads(ran.out)
