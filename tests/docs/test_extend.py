"""The policy and the tier of the page for extenders keep their contracts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvtier.policies import ChunkCopy, CopyState, PolicyContext
from kvtier.testing.eviction_contract import EvictionContract
from kvtier.testing.tier_contract import StorageTierContract
from tests.docs.pages import DOCS, blocks_of, run_page

PAGE = DOCS / "howto/extend.md"
NAMES: dict[str, Any] = run_page(PAGE)
POLICY_TESTS = [name for name in vars(EvictionContract) if name.startswith("test_")]
TestShelfTierOnThePage: type[StorageTierContract] = NAMES["TestShelfTier"]


@pytest.mark.parametrize("name", POLICY_TESTS)
def test_the_policy_on_the_page_keeps_the_contract(name: str) -> None:
    test: Callable[[], None] = getattr(NAMES["TestSecondChance"](), name)
    test()


def test_the_policy_on_the_page_has_twenty_lines() -> None:
    (text,) = (block.text for block in blocks_of(PAGE) if "class SecondChance(" in block.text)
    assert len([line for line in text.splitlines() if line.strip()]) <= 20


def test_the_policy_on_the_page_spares_what_was_used() -> None:
    policy, ctx = NAMES["SecondChance"](3), PolicyContext()
    copies = [ChunkCopy(bytes([number]) * 8, number) for number in range(3)]
    for copy in copies:
        copy.state = CopyState.RESIDENT
    policy.on_insert_many(copies, ctx)
    policy.on_hit(copies[0], ctx)
    picked = [policy.pick(lambda copy: True, ctx) for _ in range(4)]
    assert picked == [copies[1], copies[2], copies[0], None]
