"""Step for step, a replay whose copies take no time is what the simulator says it is.

The replay runs with its own batches, both sides of the connector, and real tiers, but by a
clock of the test: where the engine would sleep, all copies in flight end and the clock is set
forward. What is left of the prediction's error is then the machine's time alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.config import parse_config
from kvtier.connector import service as service_module
from kvtier.connector.metadata import ConnectorMetadata
from kvtier.connector.service import CacheService
from kvtier.connector.worker import ConnectorWorker
from kvtier.replay import ReplayOptions, replay_trace
from kvtier.replay import _engine as engine_module
from kvtier.replay import _replay as replay_module
from kvtier.sim import cache as cache_module
from kvtier.sim.cache import wait_quantiles
from kvtier.sim.time_model import TierSpeed
from kvtier.sim.traces import generate
from kvtier.types import TransferResult

pytestmark = pytest.mark.usefixtures("forked_hosts")

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CHUNK_NBYTES = 64 << 10
AT_ONCE = TierSpeed(math.inf, math.inf, 1e-9)
PATIENCE_S = 30.0


class InstantWorker(ConnectorWorker):
    """Starts loads when the engine sleeps, so that none ends in the step that planned it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._held: list[ConnectorMetadata] = []

    def start_load(self, metadata: ConnectorMetadata) -> None:
        self._held.append(metadata)

    def settle(self) -> None:
        """Let all copies end."""
        for metadata in self._held:
            super().start_load(metadata)
        self._held.clear()
        self._device.wait(set(self._loads))
        self._device.wait_for_stores()


class InstantService(CacheService):
    """Lets all jobs between tiers end when the engine sleeps, in the order they began."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._engine = self._storage.engine
        self._poll = self._engine.poll
        self._settled: deque[TransferResult] = deque()
        self._results = self._settled  # what the service looks at before it polls
        vars(self._engine)["poll"] = self._take_settled

    def settle(self) -> None:
        """Let all jobs end."""
        results: list[TransferResult] = []
        while not self._engine.idle:
            assert self._engine.wait_any(timeout_s=PATIENCE_S)
            results += self._poll()
        results += self._poll()
        self._settled += sorted(results, key=lambda result: result.job_id)

    def _take_settled(self) -> list[TransferResult]:
        settled = list(self._settled)
        self._settled.clear()
        if self._is_closed:  # no later sleep ends them
            settled += self._poll()
        return settled


class Machine:
    """The clock, and all that copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.waits: list[NDArray[np.float64]] = []
        self._copying: list[InstantWorker | InstantService] = []
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep)
        monkeypatch.setattr(engine_module, "time", clock)
        monkeypatch.setattr(service_module, "time", clock)
        for name, kind in (
            ("ConnectorWorker", InstantWorker),
            ("CacheService", InstantService),
        ):
            monkeypatch.setattr(replay_module, name, self.noted(kind))
        monkeypatch.setattr(replay_module, "measure_copies", lambda *_: AT_ONCE)
        for module in (replay_module, cache_module):
            monkeypatch.setattr(module, "wait_quantiles", self.note_waits)

    def noted(
        self, kind: type[InstantWorker | InstantService]
    ) -> Callable[..., InstantWorker | InstantService]:
        def make(*args: Any, **options: Any) -> InstantWorker | InstantService:
            self._copying.append(kind(*args, **options))
            return self._copying[-1]

        return make

    def note_waits(self, waits: NDArray[np.float64]) -> dict[str, float]:
        self.waits.append(waits)
        return wait_quantiles(waits)

    def sleep(self, seconds: float) -> None:
        for copying in self._copying:
            copying.settle()
        self.now_s += seconds


TIERS = [
    ((64,), "write: through", 200.0),
    ((64, 256), "write: through", 200.0),
    ((88, 16, 256), "write: evict", 200.0),
    # Dozens at once, so that many loads, stores and requests end in one step.
    ((24, 256), "write: through", 1000.0),
    ((24, 256), "write: evict, promote: move", 1000.0),
]
# Where there is RAM alone, there is nothing to load by another path.
WAYS = [
    *((*tiers, "direct") for tiers in TIERS),
    *((*tiers, "staged") for tiers in TIERS[1:]),
]


@pytest.mark.untraced
@pytest.mark.parametrize(("slots", "placement", "speedup", "load_path"), WAYS)
def test_hits_and_times_are_those_the_simulator_predicts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slots: tuple[int, ...],
    placement: str,
    speedup: float,
    load_path: str,
) -> None:
    ram, *slower = slots
    trace = generate("chat", sessions=40, per_s=2.0, chunk_tokens=256, seed=3)
    nvmes = [
        f"- kind: nvme\n  name: nvme{number}\n  path: {tmp_path / str(number)}\n"
        f"  capacity: {capacity * CHUNK_NBYTES}B\n"
        for number, capacity in enumerate(slower)
    ]
    config = parse_config(
        f"tiers:\n- kind: ram\n  capacity: {ram * CHUNK_NBYTES}B\n  huge_pages: 'off'\n"
        + "".join(nvmes)
        + f"placement: {{load_if: always, {placement}}}\n"
        f"transfer: {{load_path: {load_path}, piece: {2 * CHUNK_NBYTES}B}}\n",
        source="test",
    )
    options = ReplayOptions(
        chunk_bytes=CHUNK_NBYTES,
        gpu_bytes=1024 * CHUNK_NBYTES,
        speedup=speedup,
        requests=120,
        speeds={tier.name: AT_ONCE for tier in config.tiers[1:]},
    )
    machine = Machine(monkeypatch)
    result = replay_trace(trace, config, options)
    assert [tier.hits for tier in result.tiers] == [
        tier.predicted_hits for tier in result.tiers
    ]
    assert [tier.written_bytes for tier in result.tiers[1:]] == [
        tier.chunks_written * CHUNK_NBYTES for tier in result.predicted.tiers[1:]
    ]
    assert result.tiers[-1].hits > 0
    assert all(tier.written_bytes for tier in result.tiers)
    predicted, replayed = machine.waits[0], machine.waits[-1]
    assert len(replayed) == 120
    assert replayed == pytest.approx(predicted, abs=1e-6)
    assert result.apart() == pytest.approx(dict.fromkeys(result.apart(), 0.0), abs=1e-6)
