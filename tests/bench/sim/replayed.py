"""How far the simulator's prediction is from a replay with real bytes, by ``kvtier replay``.

The first requests of a trace go through RAM alone and through RAM and NVMe, in a command of
its own each time, as a user would run it. It takes as long as the traces do, and needs a
machine that does nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvtier.sim.traces import generate, write_trace
from tests.unit.sim_traces import TRACES

__all__ = ["AIM", "Prediction", "predictions"]

AIM: Final = 0.15
_LIMIT_S: Final = 600.0
_TIERS: Final = {
    "RAM": "tiers:\n- {kind: ram, capacity: 48MiB}\n",
    "RAM, NVMe": (
        "tiers:\n- {kind: ram, capacity: 16MiB}\n"
        "- {kind: nvme, path: DIRECTORY/store, capacity: 96MiB}\n"
    ),
}


class _Part(NamedTuple):
    """A piece of a trace, and how it is replayed."""

    name: str
    path: Path
    options: tuple[str, ...]


class Prediction(NamedTuple):
    """One figure, replayed and predicted.

    Attributes:
        what: Trace, tiers and figure.
        replayed: As it was, in ``unit``.
        predicted: As the simulator says.
        apart: How far the latter is from the former, as a share of it; None if it says
            how much the others are worth.
        unit: Of both.
    """

    what: str
    replayed: float
    predicted: float
    apart: float | None
    unit: str


def predictions(directory: Path) -> Iterator[Prediction]:
    """Replay, and compare; ``directory`` is on the disk to use."""
    with tempfile.TemporaryDirectory(prefix="kvtier-replayed-", dir=directory) as scratch:
        for part in _parts(Path(scratch)):
            for tiers, text in _TIERS.items():
                config = Path(scratch) / "kvtier.yaml"
                config.write_text(text.replace("DIRECTORY", scratch))
                result = _replay(part, config)
                yield from _figures(f"{part.name}, {tiers}", result)


def _parts(scratch: Path) -> Iterator[_Part]:
    made = scratch / "chat.jsonl"
    trace = generate("chat", sessions=40, per_s=1.0, chunk_tokens=256, seed=1)
    write_trace(trace, made)
    speedup = str(trace.duration_s / 40)
    yield _Part("made chats", made, ("--chunk-bytes", "256KiB", "--speedup", speedup))
    real = TRACES / "mooncake_conversation.jsonl"
    if real.exists():
        yield _Part("conversation trace", real, ("--chunk-bytes", "64KiB", "--requests", "150"))


def _replay(part: _Part, config: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvtier", "replay", str(part.path), *part.options]
    done = subprocess.run(
        [*command, "--config", str(config), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_LIMIT_S,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _figures(what: str, result: dict[str, Any]) -> Iterator[Prediction]:
    apart, predicted = result["apart"], result["predicted"]
    for name in ("p50", "p90"):
        yield Prediction(
            f"{what}: TTFT {name}",
            result["ttft_s"][name] * 1e3,
            predicted["ttft_s"][name] * 1e3,
            apart[name],
            "ms",
        )
    yield Prediction(
        f"{what}: chunks loaded",
        result["hit_ratio"] * 100,
        predicted["total_hit_ratio"] * 100,
        apart["hit_ratio"],
        "%",
    )
    for tier in result["tiers"]:
        hits, expected = tier["hits"], tier["predicted_hits"]
        share = expected / hits - 1 if hits else float(expected > 0)
        yield Prediction(f"{what}: hits in {tier['name']}", hits, expected, share, "chunks")
        speed = predicted["time_model"]["speeds"][tier["name"]]["read_bytes_per_s"]
        if tier["read_bytes"]:
            read = tier["read_bytes_per_s"]
            yield Prediction(
                f"{what}: read from {tier['name']}",
                read / 1e6,
                speed / 1e6,
                speed / read - 1,
                "MB/s",
            )
    yield Prediction(
        f"{what}: behind the model's clock", result["counts"]["late_s"], 0.0, None, "s"
    )
