"""The errors that a caller gets if an engine program fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.demo.runner import EngineFailedError, run_engine
from tests.demo.scenario import Scenario


def test_an_engine_that_was_killed_for_its_time_is_said_to_be(tmp_path: Path) -> None:
    nothing = Scenario(model=tmp_path, waves=())
    with pytest.raises(EngineFailedError, match=r"killed because it took more than 0\.01 s"):
        run_engine(nothing, tmp_path, "late", timeout_s=0.01)
