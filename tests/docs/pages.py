"""The pages of the manual and what is in them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: Where it is.
        line: Line of its first line of text.
        language: First word after the fence.
        remark: What follows the language: why the block is not run.
        text: Its text.
    """

    page: Path
    line: int
    language: str
    remark: str
    text: str

    @property
    def name(self) -> str:
        """What a failing test calls it."""
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """Return the page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the page's blocks; directives such as ``{toctree}`` are none."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        language, _, remark = found[1].strip().partition(" ")
        if not language.startswith("{"):
            line = text.count("\n", 0, found.start()) + 2
            yield Block(page, line, language, remark, found[2])


def all_blocks(*languages: str) -> list[Block]:
    """Return the blocks of all pages, of ``languages`` if there are any."""
    found = [block for page in PAGES for block in blocks_of(page)]
    return [block for block in found if not languages or block.language in languages]


def prose_of(page: Path) -> str:
    """Return the page's text without its blocks."""
    return FENCE.sub("", page.read_text())


def run_page(page: Path) -> dict[str, object]:
    """Run the page's Python blocks one after the other; return the names they left."""
    # Their classes look their module up, so it has to be one that exists.
    names: dict[str, object] = {"__name__": __name__}
    for block in blocks_of(page):
        if block.language == "python" and not block.remark:
            # Blank lines in front make a traceback name the page's own line.
            source = "\n" * (block.line - 1) + block.text
            exec(compile(source, page, "exec", dont_inherit=True), names)
    return names


@functools.cache
def messages() -> str:
    """Return every text in kvtier's source, one per line; what is filled in is ``{}``."""
    found = []
    for module in sorted((ROOT / "kvtier").rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(map(_part, node.values)))
    return "\n".join(found)


def _part(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "{}"
