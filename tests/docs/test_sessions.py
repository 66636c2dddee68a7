"""Every slow test is run by a session, and whoever looks for it finds its name."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator

import pytest

from tests.docs.pages import ROOT

README = (ROOT / "README.md").read_text()
NOXFILE = (ROOT / "noxfile.py").read_text()
MARKERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["markers"]


def sessions() -> Iterator[tuple[str, set[str]]]:
    """Yield each session's name and the texts in it."""
    for node in ast.parse(NOXFILE).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        decorators = [ast.unparse(each) for each in node.decorator_list]
        if not any(each.startswith("nox.session") for each in decorators):
            continue
        renamed = re.search(r"nox\.session\(name='([^']+)'", "\n".join(decorators))
        texts = {
            each.value
            for each in ast.walk(node)
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        }
        yield (renamed[1] if renamed else node.name), texts


NIGHTLY = {name: texts for name, texts in sessions() if name.startswith("stress")}


def slow_suites() -> set[str]:
    """Return the folders below tests/ that have slow tests."""
    return {
        path.relative_to(ROOT).parts[1]
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.slow\b", path.read_text())
    }


def test_there_are_slow_tests_with_engines_and_without() -> None:
    assert {"unit", "integration"} <= slow_suites()


def test_ci_runs_every_default_session_once() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    (defaults,) = re.findall(r"^nox\.options\.sessions = (.+)$", NOXFILE, re.MULTILINE)
    checked = " ".join(re.findall(r"check -s ([\w ]*\w)", script)).split()
    assert sorted(checked) == sorted(ast.literal_eval(defaults))


@pytest.mark.parametrize("suite", sorted(slow_suites()))
def test_a_suite_with_slow_tests_is_run_by_one_nightly_session(suite: str) -> None:
    (session,) = (name for name, texts in NIGHTLY.items() if f"tests/{suite}" in texts)
    assert any("slow" in text.split() for text in NIGHTLY[session])


@pytest.mark.parametrize("session", NIGHTLY)
def test_the_marker_and_the_readme_name_each_nightly_session(session: str) -> None:
    (slow,) = (text for text in MARKERS if text.startswith("slow:"))
    named = r"(?<![\w-])" + re.escape(session) + r"(?![\w-])"
    assert re.search(named, slow)
    assert re.search(rf"nox -s .*{named}", README)
