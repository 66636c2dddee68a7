"""The supported range of vLLM has one owner, ``pyproject.toml``."""

from __future__ import annotations

import re
import tomllib

from kvtier.vllm.versions import supported
from tests.docs.pages import DOCS, PAGES, ROOT

PAGE = DOCS / "reference/versions.md"


def test_the_page_on_versions_has_the_range_of_the_code() -> None:
    text = PAGE.read_text()
    assert f"{supported()}.\n" in text
    errors = re.findall(r"^UnsupportedError: .*: (.*)$", text, re.MULTILINE)
    assert set(errors) == {supported()}


def test_no_other_page_repeats_the_range() -> None:
    for page in PAGES:
        if page != PAGE:
            assert supported().split()[-1] not in page.read_text(), page


def test_guides_leave_the_tested_version_to_the_page_on_versions() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    tested = tomllib.loads(text)["tool"]["kvtier"]["vllm"]["tests"].rpartition(".")[0]
    assert f"| {tested}.0 | all of kvtier's tests |" in PAGE.read_text()
    records = {PAGE, DOCS / "benchmarks.md", *(DOCS / "design/decisions").iterdir()}
    for page in set(PAGES) - records:
        assert f"vLLM {tested}" not in page.read_text(), page
