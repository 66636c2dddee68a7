"""The package as a whole: what it exports, what importing it costs, what it declares."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import kvtier

ROOT = Path(kvtier.__file__).parent
CHECKOUT = Path(__file__).resolve().parents[2]
PYPROJECT = CHECKOUT / "pyproject.toml"
NEEDS_VLLM = {
    "kvtier.memory.cuda_hash",
    "kvtier.memory.cuda_kernel",  # Triton, which comes with vLLM
    "kvtier.vllm",
    *(f"kvtier.vllm.{name}" for name in ("connector", "events", "metrics", "offline", "spec")),
}
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages([str(ROOT)], "kvtier.")
    if module.name not in NEEDS_VLLM and not module.name.endswith("__main__")
)


def project() -> dict[str, Any]:
    declared: dict[str, Any] = tomllib.loads(PYPROJECT.read_text())["project"]
    return declared


def entry_points() -> list[str]:
    declared = project()
    groups = [*declared["entry-points"].values(), declared["scripts"]]
    return sorted(target for group in groups for target in group.values())


def test_importing_kvtier_loads_no_heavy_package() -> None:
    code = (
        "import sys, kvtier\n"
        "heavy = {'torch', 'vllm', 'pytest', 'pydantic', 'numpy'}\n"
        "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == 0, f"import kvtier loaded {done.stderr}"


def test_the_version_is_the_declared_one() -> None:
    assert kvtier.__version__ == project()["version"]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_what_it_exports(name: str) -> None:
    module = importlib.import_module(name)
    exported = list(getattr(module, "__all__", ()))
    assert len(exported) == len(set(exported))
    assert [entry for entry in exported if not hasattr(module, entry)] == []


def taken_by(path: Path) -> Iterator[tuple[str, str]]:
    """Yield what the file at ``path`` imports from modules of kvtier, by module and name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvtier"):
            for alias in node.names:
                yield node.module or "", alias.name


def test_modules_import_only_exported_names() -> None:
    taken = {pair for path in ROOT.rglob("*.py") for pair in taken_by(path)}
    exported = {name: getattr(importlib.import_module(name), "__all__", ()) for name in MODULES}
    hidden = [
        f"{module}.{name}"
        for module, name in taken
        if module in exported
        and name not in exported[module]
        and f"{module}.{name}" not in exported
    ]
    assert sorted(hidden) == []
    assert ("kvtier.os.iopool", "IoPool") in taken


def test_torch_is_installed_by_the_extras_that_need_it_only() -> None:
    extras = project()["optional-dependencies"]
    assert not [name for name in project()["dependencies"] if name.startswith("torch")]
    assert [name for name, needs in extras.items() if "kvtier[torch]" in needs] == ["vllm"]
    assert [need.partition(">")[0] for need in extras["torch"]] == ["kvtier[sim]", "torch"]


def required_by(requirements: Iterable[str]) -> set[str]:
    """Return the distributions that ``requirements`` install, without extras."""
    names: set[str] = set()
    pending = list(requirements)
    while pending:
        need = Requirement(pending.pop())
        if need.name not in names and (need.marker is None or need.marker.evaluate()):
            names.add(need.name)
            pending += distribution(need.name).requires or []
    return names


def test_an_install_without_extras_takes_less_than_60_mb_of_files_as_the_readme_says() -> None:
    installed = [
        Path(str(file.locate()))
        for name in required_by(project()["dependencies"])
        for file in distribution(name).files or []
    ]
    files = [path for path in (*ROOT.rglob("*"), *installed) if path.is_file()]
    nbytes = sum(path.stat().st_size for path in files if path.suffix != ".pyc")
    assert nbytes < 60e6
    written = re.search(r"(\d+) MB of files", (CHECKOUT / "README.md").read_text())
    assert written
    assert int(written[1]) == pytest.approx(nbytes / 1e6, rel=0.15)


@pytest.mark.parametrize("target", entry_points())
def test_an_entry_point_names_something_that_exists(target: str) -> None:
    module, _, attribute = target.partition(":")
    assert hasattr(importlib.import_module(module), attribute)
