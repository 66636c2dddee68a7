"""What the manual shows works."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from kvtier.config import parse_config
from tests.docs.pages import PAGES, Block, all_blocks, blocks_of, name_of, run_page

LANGUAGES = {"python", "yaml", "text", "console", "sh", "toml"}
RUNNABLE = [page for page in PAGES if any(b.language == "python" for b in blocks_of(page))]


@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        run_page(page)


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=lambda block: block.name)
def test_a_configuration_on_a_page_is_one(block: Block) -> None:
    if block.remark:
        pytest.skip(block.remark)
    assert parse_config(block.text, source=block.name).tiers


def test_every_block_is_in_a_language_that_is_checked_or_is_only_read() -> None:
    strange = {block.name: block.language for block in all_blocks()}
    assert {name: word for name, word in strange.items() if word not in LANGUAGES} == {}


def test_there_is_something_to_check() -> None:
    assert RUNNABLE
    assert all_blocks("yaml")
