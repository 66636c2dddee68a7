"""The supported range of vLLM has one owner, ``kvtier/vllm/versions.py``."""

from __future__ import annotations

import re
import tomllib

from kvtier.vllm.versions import NEWEST, OLDEST, SUPPORTED
from tests.docs.pages import DOCS, PAGES, ROOT

PAGE = DOCS / "reference/versions.md"
RANGE = re.compile(r"\b\d\.\d+ to \d\.\d+\b")


def test_the_page_on_versions_has_the_range_of_the_code() -> None:
    text = PAGE.read_text()
    assert f"{SUPPORTED}.\n" in text
    errors = re.findall(r"^UnsupportedError: .*: (.*)$", text, re.MULTILINE)
    assert set(errors) == {SUPPORTED}


def test_no_other_page_repeats_the_range() -> None:
    for page in PAGES:
        if page != PAGE:
            ranges = RANGE.findall(page.read_text())
            assert f"{OLDEST} to {NEWEST}" not in ranges, page


def test_guides_leave_the_tested_version_to_the_page_on_versions() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    tested = tomllib.loads(text)["tool"]["kvtier"]["vllm"]["tests"].rpartition(".")[0]
    assert f"| {tested}.0 | all of kvtier's tests |" in PAGE.read_text()
    records = {PAGE, DOCS / "benchmarks.md", *(DOCS / "design/decisions").iterdir()}
    for page in set(PAGES) - records:
        assert f"vLLM {tested}" not in page.read_text(), page


def test_an_installation_gets_a_version_of_the_range() -> None:
    major, minor = NEWEST.split(".")
    requirement = f"vllm>={OLDEST},<{major}.{int(minor) + 1}"
    assert requirement in (ROOT / "pyproject.toml").read_text()
