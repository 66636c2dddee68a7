"""Whoever gets on first, no byte is loaded or kept that its key does not name."""

from __future__ import annotations

import pytest

from tests.stateful.bytes_world import MODELS, BytesWorld

STEPS = 120


@pytest.mark.untraced
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(3))
def test_where_nothing_goes_wrong_no_load_fails(
    model: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BytesWorld(seed, monkeypatch, model=model, calm=True) as world:
        world.run(STEPS)
        assert world.checked_blocks, "nothing was loaded"


@pytest.mark.untraced
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", [0, 1, 3, 5])
def test_every_byte_is_right_in_any_order_of_threads(
    model: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BytesWorld(seed, monkeypatch, model=model) as world:
        world.run(STEPS)
        assert world.checked_blocks, "nothing was loaded"
