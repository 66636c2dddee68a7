"""A shutdown ends in time and closes every part, although parts hang or raise."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, cast

import pytest

from kvtier.connector.service import CacheService
from tests.support.stepped import SteppedCache
from tests.unit.test_cache_service import Context, store

CLOSE_TIMEOUT_S = 30.0


class Part:
    """A part whose close takes all the time it gets, or raises."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self._world = world

    def close(self, *, timeout_s: float = 0.0) -> bool:
        return self._world.close(self.name, timeout_s)


class World:
    """A cache with a dirty chunk; its clock advances only while a part hangs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, raising: str = "") -> None:
        self.cache = SteppedCache(8, 16)
        store(self.cache, Context("a"), 2, ends_first=False)
        self.waits_s: dict[str, float] = {}
        self._raising = raising
        self._now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: self._now_s)
        engine = self.cache.engine
        engine.hangs = True
        monkeypatch.setattr(
            engine, "wait_any", lambda *, timeout_s: self.hang("drain", timeout_s)
        )
        monkeypatch.setattr(engine, "close", Part("engine", self).close)
        parts = {name: Part(name, self) for name in ("recorder", "observer")}
        region = self.cache.storage.region
        monkeypatch.setattr(region, "close", Part("region", self).close)
        pools = cast("Any", [Part("pool", self)])
        storage = dataclasses.replace(self.cache.storage, pools=pools, **cast("Any", parts))
        self.service = CacheService(
            storage, tokens_per_chunk=16, close_timeout_s=CLOSE_TIMEOUT_S
        )

    def hang(self, name: str, timeout_s: float) -> bool:
        self.waits_s[name] = timeout_s
        self._now_s += timeout_s
        return False

    def close(self, name: str, timeout_s: float) -> bool:
        self.hang(name, timeout_s)
        if name == self._raising:
            raise OSError(5, "a bug")
        return False


PARTS = ["drain", "observer", "engine", "recorder", "pool", "region"]


def test_a_shutdown_in_which_every_part_hangs_ends_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    world.service.shutdown()
    assert list(world.waits_s) == PARTS
    assert sum(world.waits_s.values()) == pytest.approx(CLOSE_TIMEOUT_S)
    assert world.waits_s["engine"] > 3, "for jobs and tiers to end"
    assert world.waits_s["recorder"] > 0.5
    assert world.waits_s["pool"] > 0.1


@pytest.mark.parametrize("raising", PARTS[1:])
def test_a_part_that_raises_keeps_no_other_part_open(
    monkeypatch: pytest.MonkeyPatch, raising: str
) -> None:
    world = World(monkeypatch, raising)
    with pytest.raises(OSError, match="a bug"):
        world.service.shutdown()
    assert list(world.waits_s) == PARTS
    world.service.shutdown()
