"""Whoever gets on first, no byte is loaded or kept that its key does not name."""

from __future__ import annotations

import pytest

from tests.stateful.bytes_world import BytesWorld

STEPS = 120


@pytest.mark.untraced
@pytest.mark.parametrize("seed", range(8))
def test_where_nothing_goes_wrong_no_load_fails(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BytesWorld(seed, monkeypatch, calm=True) as world:
        world.run(STEPS)
        assert world.checked_blocks, "nothing was loaded"


@pytest.mark.untraced
@pytest.mark.parametrize("seed", range(16))
def test_every_byte_is_its_keys_whoever_gets_on_first(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BytesWorld(seed, monkeypatch) as world:
        world.run(STEPS)
        assert world.checked_blocks, "nothing was loaded"
