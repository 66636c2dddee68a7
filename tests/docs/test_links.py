"""What the manual points at exists: pages, headings, files and tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT, messages, name_of, prose_of

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
OURS = re.compile(r"(kvtier|tests|configs|docs)/[\w/.-]+")
TESTS = "\n".join(
    path.read_text()
    for root in (ROOT / "tests", ROOT / "kvtier/testing")
    for path in root.rglob("*.py")
)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(prose_of(page)):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.is_relative_to(ROOT), target
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_file_and_test_a_page_names_exists(page: Path) -> None:
    for code in CODE.findall(prose_of(page)):
        if OURS.fullmatch(code):
            assert (ROOT / code).exists(), code
        if re.fullmatch(r"test_\w+", code):
            assert re.search(rf"def {code}\(", TESTS), code


def test_every_page_is_in_the_table_of_contents() -> None:
    listed: set[Path] = set()
    for page in PAGES:
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
            entries = [line for line in tree.split("\n") if line and not line.startswith(":")]
            listed |= {page.parent / f"{entry}.md" for entry in entries}
    assert listed == {page for page in PAGES if DOCS in page.parents} - {DOCS / "index.md"}


def test_every_message_that_the_page_for_operators_explains_is_one_kvtier_has() -> None:
    page = prose_of(DOCS / "howto/operate.md")
    tables = page.split("\n## Errors at the start\n", 1)[1]
    explained = [
        code
        for cell in re.findall(r"^\| (`[^|]*) \|", tables, re.MULTILINE)
        for code in CODE.findall(cell)
    ]
    assert explained
    for code in explained:
        parts = [re.escape(part.strip()) for part in code.split("...") if part.strip()]
        assert re.search("(?:.*)".join(parts), messages()), code


def anchors(page: Path) -> set[str]:
    """Return what the headings of ``page`` are called in a link."""
    names = HEADING.findall(prose_of(page))
    return {re.sub(r"[^\w -]", "", name).lower().replace(" ", "-") for name in names}
