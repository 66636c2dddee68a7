"""A transfer engine on a route that does what the test says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from kvtier.transfer import TransferEngine
from tests.unit.transfer_engine.scripted import DOWN, UP, MakeEngine, Scripted, engine_of


@pytest.fixture
def route() -> Scripted:
    return Scripted()


@pytest.fixture
def make_engine(route: Scripted) -> Iterator[MakeEngine]:
    engines: list[TransferEngine] = []

    def make(
        openers: Sequence[Callable[[], Awaitable[None]]] = (), **limits: Any
    ) -> TransferEngine:
        engines.append(engine_of(route, UP, DOWN, limits=limits, openers=openers))
        return engines[-1]

    yield make
    for gate in route.gates.values():
        gate.set()
    for engine in engines:
        engine.close(timeout_s=10)
