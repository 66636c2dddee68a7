"""What a router hears of a real engine's tiers, and what a request may ask of them.

One engine publishes to a subscriber through vLLM's own publisher while its requests ask for
this and that; a second one starts on the same store, with a configured cost of computing of 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
import zmq
from typer.testing import CliRunner
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvtier.cli._app import app
from kvtier.keys import GROUP_NBYTES
from tests.demo.runner import run_engine
from tests.demo.scenario import Prompt, Report, Scenario, Wave, WaveReport
from tests.integration.harness import Reference, Site

RAM_BLOCKS = 64
NVME_BLOCKS = 2048
QUIET_MS = 500
RECONNECT_MS = 5
MEDIA = ("CPU", "STORAGE")
TIERS = {"CPU": "ram", "STORAGE": "nvme"}

ASKED = 8
"""Prompts of each wave that is compared."""
FILLING = 14
"""Prompts that take every block of the GPU, so that the next wave finds nothing there."""
NOTHING = {"kvtier": {"skip_store": True, "skip_load": True}}


class Subscriber:
    """Takes down everything an engine publishes, from its first message on.

    Args:
        path: Of the socket; a short one, as the system demands.
    """

    def __init__(self, path: Path) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.subscribe(b"")
        # It is there before the publisher is, and at once when that comes: long before the
        # engine's first step.
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.endpoint = f"ipc://{path}"
        self._socket.connect(self.endpoint)

    def messages(self) -> list[KVEventBatch]:
        """Return what the engine, which is gone, has sent; no batch may be missing."""
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        batches: list[KVEventBatch] = []
        while self._socket.poll(QUIET_MS):
            _, number, payload = self._socket.recv_multipart()
            assert int.from_bytes(number, "big") == len(batches)
            batches.append(decoder.decode(payload))
        return batches

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


def residency(batches: Sequence[KVEventBatch]) -> dict[str, set[Any]]:
    """Replay what was published; return the blocks of each medium."""
    listed: dict[str, set[Any]] = {medium: set() for medium in MEDIA}
    for event in (event for batch in batches for event in batch.events):
        if not isinstance(event, BlockStored | BlockRemoved) or event.medium not in listed:
            continue
        hashes = set(event.block_hashes)
        if isinstance(event, BlockStored):
            assert not hashes & listed[event.medium], "stored twice"
            listed[event.medium] |= hashes
        else:
            assert hashes <= listed[event.medium], "removed before it was stored"
            listed[event.medium] -= hashes
    return listed


def on_disk(store: Path) -> set[Any]:
    """Return the blocks that the store's index has, as events name them."""
    answer = CliRunner().invoke(app, ["cache", "ls", "--limit", "0", "--json", str(store)])
    assert answer.exit_code == 0, answer.output
    (listing,) = json.loads(answer.stdout)
    keys = [bytes.fromhex(entry["key"]) for entry in listing["listed"]]
    return {maybe_convert_block_hash(BlockHash(key[:-GROUP_NBYTES])) for key in keys}


def asking(prompts: Sequence[Prompt], params: dict[str, Any]) -> Wave:
    return Wave(
        prompts=tuple(
            prompt.model_copy(update={"transfer_params": params}) for prompt in prompts
        )
    )


@dataclass(frozen=True, slots=True)
class Run:
    """Both engines: what they did and what was heard of them."""

    site: Site
    waves: dict[str, WaveReport]
    again: Sequence[WaveReport]
    first: list[KVEventBatch]
    kept: set[Any]
    """Blocks on disk between the engines."""
    second: list[KVEventBatch]
    left: set[Any]
    """Blocks on disk after them."""

    def growth(self, wave: str, counter: str, tier: str) -> float:
        return self.waves[wave].counters[f"kvtier_{counter}{{tier={tier}}}"]


def waves_of(reference: Reference) -> dict[str, Wave]:
    known, other = (reference.conversations[turn].prompts for turn in (1, 2))
    asked, fresh = known[:ASKED], known[ASKED : ASKED + 4]
    filling = asking(other[-FILLING:], NOTHING)
    nonsense = {"session": "s", "retain_s": "long", "load_tiers": ["nmve"], "pin": True}
    return {
        "plain": asking(asked, {"kvtier": {"session": "chat 7"}}),
        "stored nothing": filling,
        "loaded nothing": asking(asked, {"kvtier": {"skip_load": True}}),
        "fill 1": filling,
        "ram only": asking(asked, {"kvtier": {"load_tiers": ["ram"]}}),
        "fill 2": filling,
        "cpu only": asking(asked, {"kv_load_tiers": [{"medium": "CPU"}]}),
        "fill 3": filling,
        "any tier": asking(asked, {"kvtier": nonsense}),
        "kept off the disk": asking(fresh, {"kvtier": {"store_tiers": ["ram"]}}),
        "reset": asking(asked[:4], {}).model_copy(update={"reset_first": True}),
    }


def engine_of(
    site: Site, waves: Sequence[Wave], endpoint: str, placement: dict[str, str]
) -> Scenario:
    scenario = site.scenario(waves, ram_blocks=RAM_BLOCKS, nvme_blocks=NVME_BLOCKS)
    assert scenario.config is not None
    values = yaml.safe_load(scenario.config.read_text())
    # RAM is so small that a step's new chunks are more than the disk is usually asked to take.
    placement = placement | {"backlog_limit": "100%"}
    values["tiers"][1]["keep_after_reset"] = True
    values |= {"trace": {"record": str(site.directory / "trace")}, "placement": placement}
    scenario.config.write_text(yaml.safe_dump(values))
    return scenario.model_copy(update={"events": endpoint})


@pytest.fixture(scope="module")
def run(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    site = Site(tmp_path_factory.mktemp("events"), reference)
    waves = waves_of(reference)
    left = waves["reset"].prompts
    lives = [
        (list(waves.values()), {"load_if": "always"}),
        ([Wave(prompts=left[:2]), Wave(prompts=left[2:])], {"recompute_per_token": "0.01us"}),
    ]
    listeners = [Subscriber(site.directory / f"{number}") for number in range(len(lives))]
    reports: list[Report] = []
    kept: list[set[Any]] = []
    try:
        for number, (listener, (part, placement)) in enumerate(
            zip(listeners, lives, strict=True)
        ):
            scenario = engine_of(site, part, listener.endpoint, placement)
            reports.append(run_engine(scenario, site.directory, f"engine-{number}"))
            reference.assert_equal(reports[-1], waves=part)
            kept.append(on_disk(site.store))
        yield Run(
            site=site,
            waves=dict(zip(waves, reports[0].waves, strict=True)),
            again=reports[1].waves,
            first=listeners[0].messages(),
            kept=kept[0],
            second=listeners[1].messages(),
            left=kept[1],
        )
    finally:
        for listener in listeners:
            listener.close()


def test_replaying_the_events_gives_what_each_tier_has(run: Run) -> None:
    listed = residency(run.first)
    last = run.waves["reset"].counters
    for medium, tier in TIERS.items():
        assert len(listed[medium]) == last[f"kvtier_used_chunks{{tier={tier}}}"] > 0
    assert listed["STORAGE"] == run.kept


def test_a_reset_is_heard_as_the_removal_of_everything(run: Run) -> None:
    listed: dict[str, set[Any]] = {medium: set() for medium in MEDIA}
    emptied = dict.fromkeys(MEDIA, 0)
    for event in (event for batch in run.first for event in batch.events):
        if isinstance(event, BlockRemoved) and event.medium in listed:
            listed[event.medium] -= set(event.block_hashes)
            emptied[event.medium] += not listed[event.medium]
        elif isinstance(event, BlockStored) and event.medium in listed:
            listed[event.medium] |= set(event.block_hashes)
    assert emptied["STORAGE"] == 1, "nothing else empties a disk that is never full"
    assert emptied["CPU"] >= 1


def test_recovered_chunks_are_announced_before_anything_else(run: Run) -> None:
    heard: set[Any] = set()
    for event in (event for batch in run.second for event in batch.events):
        if isinstance(event, BlockStored) and event.medium == "STORAGE":
            heard |= set(event.block_hashes)
        elif isinstance(event, BlockStored | BlockRemoved) and event.medium == "CPU":
            break
    assert heard == run.kept
    assert residency(run.second)["STORAGE"] == run.left


def test_a_request_that_skips_storing_stores_nothing(run: Run) -> None:
    assert run.growth("plain", "stored_chunks", "ram") > 0
    for wave in ("stored nothing", "fill 1", "fill 2"):
        assert run.growth(wave, "stored_chunks", "ram") == 0
        assert run.growth(wave, "stored_chunks", "nvme") == 0


def test_a_request_that_skips_loading_loads_nothing(run: Run) -> None:
    for tier in TIERS.values():
        assert run.growth("loaded nothing", "hit_chunks", tier) == 0
    assert run.growth("any tier", "hit_chunks", "nvme") > 0


@pytest.mark.parametrize("wave", ["ram only", "cpu only"])
def test_a_request_that_may_load_from_ram_does_not_wait_for_the_disk(
    run: Run, wave: str
) -> None:
    assert run.growth(wave, "hit_chunks", "nvme") == 0
    assert run.growth(wave, "read_bytes", "nvme") == 0
    assert run.growth(wave, "hit_chunks", "ram") > 0


def test_chunks_of_a_request_that_names_ram_never_reach_the_disk(run: Run) -> None:
    assert run.growth("kept off the disk", "stored_chunks", "ram") > 0
    assert run.growth("kept off the disk", "stored_chunks", "nvme") == 0


def test_invalid_hints_are_logged_once_and_ignored(run: Run) -> None:
    log = run.site.log("engine-0")
    for field in ("retain_s = 'long'", "load_tiers = ('nmve',)", "* = {'pin': True}"):
        assert log.count(f"kv_transfer_params.kvtier.{field} is ignored") == 1


def test_the_entry_point_reports_how_long_the_engine_computes(run: Run) -> None:
    last = run.waves["reset"].counters
    assert 1e-6 < last["kvtier_recompute_seconds_per_token{}"] < 0.1


def test_chunks_that_compute_faster_than_they_load_are_computed(run: Run) -> None:
    known, skipped = run.again
    assert known.counters["kvtier_hit_chunks{tier=nvme}"] > 0, "nothing was measured before"
    assert known.counters["kvtier_load_seconds_per_gb{tier=nvme}"] > 0
    assert skipped.counters["kvtier_hit_chunks{tier=nvme}"] == 0
    assert skipped.counters["kvtier_skipped_load_chunks{tier=nvme}"] > 0
    assert "computing is faster than loading" in run.site.log("engine-1")


def test_the_recording_has_the_sessions(run: Run) -> None:
    (requests, _) = sorted(run.site.directory.glob("trace/requests-*.jsonl"))
    sessions = [
        json.loads(line).get("session_id") for line in requests.read_text().split("\n")[:-1]
    ]
    assert sessions.count("chat 7") == ASKED
    assert sessions.count("s") == ASKED
    assert sessions.count(None) == len(sessions) - 2 * ASKED
