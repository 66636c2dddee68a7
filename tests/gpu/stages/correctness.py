"""The tests of tests/gpu, each file in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.gpu.bench import Bench
from tests.gpu.runner import ROOT

__all__ = ["Tested", "run", "run_pytest"]

# Nothing of pyproject.toml and tests/conftest.py, which need packages that may be absent.
_OPTIONS: Final = (
    *("-c", "/dev/null", f"--rootdir={ROOT}", "--noconftest", "--import-mode=importlib"),
    *("-o", "markers=gpu: needs a CUDA device"),
    *("-p", "no:cacheprovider", "-o", "faulthandler_timeout=30", "-ra", "--tb=short"),
)
_NOTHING_COLLECTED: Final = 5
# Those that happen to be installed may not fit this pytest.
_WITHOUT_PLUGINS: Final = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@dataclass(frozen=True, slots=True)
class Tested:
    """What a run of pytest found.

    Attributes:
        passed: Number of tests that passed.
        skipped: Number of tests that were skipped.
        failed: Names of those that failed.
        code: Exit status of the process.
    """

    passed: int
    skipped: int
    failed: tuple[str, ...]
    code: int

    def __str__(self) -> str:
        failed = f", failed: {', '.join(self.failed)}" if self.failed else ""
        status = f", status {self.code}" if self.code not in {0, 1} else ""
        return f"{self.passed} passed, {self.skipped} skipped{failed}{status}"


def run(bench: Bench) -> None:
    """Run the tests, or collect them in a rehearsal.

    A file of which none passed has failed, unless it is skipped because a package is absent.
    """
    for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        tested = run_pytest(bench.sized([str(path)], [str(path), "--collect-only"]))
        bench.fact(path.name, tested)
        if tested.code != _NOTHING_COLLECTED:
            bench.failed |= tested.code != 0 or not (tested.passed or bench.rehearses)


def run_pytest(
    arguments: Sequence[str], *, before: Sequence[str] = (), variables: Mapping[str, str] = {}
) -> Tested:
    """Run pytest in a process.

    Args:
        arguments: The tests, and options.
        before: What the command begins with.
        variables: Environment variables to add.
    """
    options = list(_OPTIONS)
    if importlib.util.find_spec("pytest_asyncio"):
        options += ["-p", "pytest_asyncio.plugin", "-o", "asyncio_mode=auto"]
    with tempfile.TemporaryDirectory(prefix="kvtier-gpu-") as scratch:
        report = Path(scratch) / "report.xml"
        command = [*before, sys.executable, "-m", "pytest", *options]
        code = subprocess.run(
            [*command, f"--junitxml={report}", *arguments],
            env={**os.environ, **_WITHOUT_PLUGINS, **variables},  # noqa: TID251 - handed on
            cwd=ROOT,
            check=False,
        ).returncode
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
    failed = [case for case in cases if {"failure", "error"} & {each.tag for each in case}]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = tuple(case.get("name", "?") for case in failed)
    return Tested(len(cases) - len(failed) - len(skipped), len(skipped), names, code)
