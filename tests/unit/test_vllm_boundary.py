"""kvtier uses vLLM's public contract only, as its sources show."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "kvtier"
SPEC = PACKAGE / "vllm/spec.py"
MAX_SPEC_LINES = 700
OFFLOADING = ("vllm.distributed.kv_transfer.kv_connector.v1.offloading", "vllm.v1.kv_offload")
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


def modules(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield every module that is imported, and every text that could be the name of one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_names(scope: ast.ClassDef) -> set[str]:
    """Return the private names that a class defines for itself."""
    names = {each.name for each in scope.body if isinstance(each, ast.FunctionDef)}
    for node in ast.walk(scope):
        stored = isinstance(getattr(node, "ctx", None), ast.Store)
        if stored and isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif stored and isinstance(node, ast.Name):
            names.add(node.id)
    return names


def foreign_reads(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module reads of objects which it does not define."""
    own: dict[int, set[str]] = {}
    for scope in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        own |= dict.fromkeys(map(id, ast.walk(scope)), own_names(scope))
    for node in ast.walk(tree):
        yield from filter(is_private, foreign_names(node, own.get(id(node), set())))


def foreign_names(node: ast.AST, own: set[str]) -> Iterator[str]:
    """Yield the names that ``node`` reads, other than ``own`` ones of its class."""
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
            if name not in own:
                yield name
        case ast.Attribute(attr=name):
            yield name
        case ast.Call(func=ast.Name(id=call), args=[_, ast.Constant(value=str(name)), *_]):
            if call in BY_NAME:
                yield name
        case ast.ImportFrom(module=str(module), names=names) if module.startswith("vllm"):
            yield from (each.name for each in names)


def test_only_the_spec_names_vllms_offloading_package() -> None:
    naming = {
        path
        for path in modules(PACKAGE)
        if any(name.startswith(OFFLOADING) for name in imported(ast.parse(path.read_text())))
    }
    assert naming == {SPEC}
    assert len(SPEC.read_text().splitlines()) <= MAX_SPEC_LINES


@pytest.mark.parametrize("path", modules(PACKAGE / "vllm"), ids=lambda path: path.name)
def test_no_private_attribute_of_vllm_is_read(path: Path) -> None:
    assert list(foreign_reads(ast.parse(path.read_text()))) == []


def test_the_coverage_omits_only_files_that_import_vllm_when_they_are_loaded() -> None:
    loading = {
        str(path.relative_to(PACKAGE.parent))
        for path in modules(PACKAGE)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(name.startswith(("vllm", "triton")) for name in names_of(node))
    }
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    assert set(settings["tool"]["coverage"]["run"]["omit"]) == loading
    conftest = (PACKAGE.parent / "tests/conftest.py").read_text()
    assert all(f'"{path}"' in conftest for path in loading)


def names_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the modules that a statement imports; Triton comes with vLLM."""
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names]


def test_the_search_finds_what_it_looks_for() -> None:
    source = """
import vllm.v1.kv_offload.base
from vllm.config import _hidden

class Connector(Base):
    def start(self, scheduler):
        self._own = scheduler._requests
        return self._own, self._role, getattr(scheduler, "_jobs"), self.__class__
"""
    tree = ast.parse(source)
    assert "vllm.v1.kv_offload.base" in set(imported(tree))
    assert sorted(foreign_reads(tree)) == ["_hidden", "_jobs", "_requests", "_role"]
