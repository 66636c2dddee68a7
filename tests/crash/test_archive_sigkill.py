"""An export or import that is killed at any moment leaves good chunks only, and goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.os.iopool import IoPool
from tests.unit.ram_directory import ram_directory
from tests.unit.stores import SLOTS, Store

ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory() -> Iterator[Path]:
    with ram_directory() as directory:
        yield directory


def test_a_kill_at_any_call_leaves_good_chunks_only_and_the_next_run_goes_on(
    directory: Path,
) -> None:
    pool = IoPool(2, name="kvtier-test")
    source = Store(directory / "source", pool).filled()
    pool.close(timeout_s=10)
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.killed_imports", source.root, directory],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    kills = [json.loads(line) for line in done.stdout.splitlines()]
    exports = [kill for kill in kills if kill["what"] == "export"]
    imports = [kill for kill in kills if kill["what"] == "import"]
    assert len(exports) > 20
    assert {kill["whole"] for kill in exports} == {SLOTS}
    assert len(imports) > 30
    assert {kill["whole"] for kill in imports} == {SLOTS}
    kept = [kill["kept"] for kill in imports]
    assert (kept[0], kept[-1]) == (0, SLOTS)
    assert len(set(kept)) > 2, "some kills are between two commits"
