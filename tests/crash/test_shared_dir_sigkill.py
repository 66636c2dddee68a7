"""An engine that is killed at any moment leaves whole values in a shared directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.unit.ram_directory import ram_directory

ROOT = Path(__file__).parents[2]


def test_a_kill_at_any_call_leaves_whole_values_and_the_next_engine_goes_on() -> None:
    with ram_directory() as directory:
        done = subprocess.run(
            [sys.executable, "-m", "tests.crash.killed_puts", directory],
            capture_output=True,
            text=True,
            check=False,
            timeout=220,
            cwd=ROOT,
        )
    assert done.returncode == 0, done.stderr
    kills = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kills) > 40
    assert not any(kills[0]["found"])
    assert [1, 1, 1] in [kill["found"][:3] for kill in kills]
    assert [2, 1, 1] in [kill["found"][:3] for kill in kills]
    assert all(kill["later"][-1] == 1 for kill in kills)
    assert all(kill["files"] <= 7 for kill in kills)
