"""The supported range of vLLM has one owner, ``kvtier/vllm/versions.py``."""

from __future__ import annotations

import re

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


def test_an_installation_gets_a_version_of_the_range() -> None:
    major, minor = NEWEST.split(".")
    requirement = f"vllm>={OLDEST},<{major}.{int(minor) + 1}"
    assert requirement in (ROOT / "pyproject.toml").read_text()
