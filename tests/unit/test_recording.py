"""Recordings: what is written, when it ends, and that a replay is the run."""

from __future__ import annotations

import inspect
import json
import random
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier.sim.recorded import replay_calls
from typer.testing import CliRunner

from kvtier.cli._app import app
from kvtier.config import KvtierConfig, TraceConfig, check_environment, parse_config
from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey, make_key
from kvtier.manager import TieredOffloadingManager
from kvtier.manager.building import build_manager, build_tiers
from kvtier.recording import (
    CallEncoder,
    ManagerSetup,
    Recorder,
    RecordingManager,
    RequestLog,
    RequestRecord,
)
from kvtier.recording import _recorder as recorder_module
from kvtier.recording._files import NumberedFiles
from kvtier.sim._engine import ModelEngine, ModelRequest
from kvtier.sim._tiers import chunk_keys
from kvtier.sim._truth import HonestTruth
from kvtier.sim.timing import TierSpeed, TimeModel, TransferModel
from kvtier.sim.traces import TraceError, read_trace

CHUNK = 1 << 20
RECOVERED = 3
READ_ONLY = {
    "dropped",
    "has_work",
    "in_ram",
    "load_source",
    "snapshot",
    "take_cancels",
    "take_corrupt",
    "take_events",
    "take_reuse_gaps",
}


def setup_of(ram: int, nvme: int, text: str = "") -> ManagerSetup:
    config = parse_config(
        f"tiers:\n- {{kind: ram, capacity: {ram}MiB}}\n"
        f"- {{kind: nvme, path: /nowhere/at/all, capacity: {nvme}MiB}}\n{text}",
        source="kvtier.yaml",
    )
    return ManagerSetup(config, [ram, nvme], CHUNK, 16)


class Forgetful(HonestTruth):
    """Workers of whom now and then one did not write its bytes, or is still busy."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._draw = random.Random(seed)

    def stored(self, slots: Sequence[int], generations: Sequence[int]) -> list[bool]:
        return [self._draw.random() < 0.9 for _ in slots]

    def quiet(self, slots: Sequence[int]) -> list[bool]:
        return [self._draw.random() < 0.5 for _ in slots]


def record_run(
    path: Path, setup: ManagerSetup, chains: Sequence[Sequence[int]], *, seed: int
) -> TieredOffloadingManager:
    """Serve ``chains`` in model time, reset half way, and write every call to ``path``."""
    encoder = CallEncoder()
    lines = [setup.line()]

    def note(name: str, values: Mapping[str, Any]) -> None:
        lines.extend(encoder.lines(name, values))

    tiers = build_tiers(setup.config, setup.capacities)
    truth = Forgetful(seed)
    manager = build_manager(
        setup.config,
        tiers,
        slot_nbytes=CHUNK,
        chunk_tokens=16,
        truth=truth,
        record_events=False,
        make=partial(RecordingManager, note=note),
    )
    keys = chunk_keys(1000)
    manager.recover(1, [(keys[900 + slot], slot) for slot in range(RECOVERED)])
    speed = TierSpeed(1e7, 1e7, 0.001)
    model = TimeModel(1000.0, concurrency=4, speeds={"ram": speed, "nvme": speed})
    requests = [
        ModelRequest(number, number * 0.05, 16 * len(chain) + 1, [keys[at] for at in chain])
        for number, chain in enumerate(chains)
    ]
    half = len(requests) // 2
    for part in (requests[:half], requests[half:]):
        engine = ModelEngine(
            manager,
            model=model,
            transfers=TransferModel(model, ram="ram", slot_nbytes=CHUNK),
            truth=truth,
            chunk_tokens=16,
        )
        assert len(list(engine.serve(part))) == len(part)
        manager.retain([keys[at] for at in chains[0][:2]], 1e9)
        if part and part[-1] is requests[half - 1]:
            manager.reset()
    manager.flush()
    manager.take_jobs()
    path.write_bytes(b"".join(lines))
    return manager


CHAINS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=2, max_size=30).map(
    lambda drawn: [[root * 100 + depth for depth in range(size)] for root, size in drawn]
)


@settings(max_examples=60)
@given(
    chains=CHAINS,
    ram=st.integers(4, 9),
    nvme=st.integers(4, 20),
    write=st.sampled_from(["write: through", "write: evict", "write: evict\n  promote: move"]),
    eviction=st.sampled_from(["hedged-lhd", "lru", "arc", "w-tinylfu", "prefix-lru"]),
    seed=st.integers(0, 9),
)
def test_whatever_happened_the_replay_answers_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    *,
    chains: list[list[int]],
    ram: int,
    nvme: int,
    write: str,
    eviction: str,
    seed: int,
) -> None:
    placement = f"placement:\n  {write}\n  pin_budget: 50%\n  retain_quota: 20%\n"
    setup = setup_of(ram, nvme, placement)
    tiers = [tier.model_copy(update={"eviction": eviction}) for tier in setup.config.tiers]
    config = setup.config.model_copy(update={"tiers": tuple(tiers)})
    path = tmp_path_factory.mktemp("run") / "calls.jsonl"
    manager = record_run(path, ManagerSetup(config, [ram, nvme], CHUNK, 16), chains, seed=seed)
    told: list[float] = []
    result = replay_calls(path, config, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert result.requests == len(chains)
    for tier, live in zip(result.tiers, manager.snapshot().tiers, strict=True):
        assert tier.hits == live.counters.hits
        assert tier.evictions == live.counters.evicted
        assert tier.chunks_promoted == live.counters.promoted


def test_every_call_that_changes_the_manager_is_recorded() -> None:
    public = {
        name
        for name, member in vars(TieredOffloadingManager).items()
        if not name.startswith("_") and (inspect.isroutine(member) or name in READ_ONLY)
    }
    assert public - READ_ONLY == {
        name for name in vars(RecordingManager) if not name.startswith("_")
    }


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    path = tmp_path / "calls-000001.jsonl"
    chains = [[0, 1, 2], [100, 101, 102], [0, 1, 2, 3], [200, 201], [0, 1, 2]]
    record_run(path, setup_of(4, 20), chains, seed=0)
    return path


def config_file(path: Path, eviction: str = "hedged-lhd") -> Path:
    path.write_text(
        f"tiers:\n- {{kind: ram, capacity: 4MiB, eviction: {eviction}}}\n"
        "- {kind: nvme, path: /nowhere/at/all, capacity: 20MiB}\n"
    )
    return path


def test_sim_run_replays_a_recording_of_calls(calls: Path, tmp_path: Path) -> None:
    config = config_file(tmp_path / "kvtier.yaml")
    arguments = ["sim", "run", str(calls), "--config", str(config)]
    answer = CliRunner().invoke(app, [*arguments, "--json"])
    assert answer.exit_code == 0, answer.output
    result = json.loads(answer.stdout)
    assert result["requests"] == 5
    assert [tier["name"] for tier in result["tiers"]] == ["ram", "nvme"]
    shown = CliRunner().invoke(app, arguments)
    assert "all" in shown.stdout
    assert f"{result['answers']:,} answers are the engine's" in shown.stdout


def test_another_configuration_is_refused_by_the_key_that_differs(
    calls: Path, tmp_path: Path
) -> None:
    text = config_file(tmp_path / "kvtier.yaml", eviction="fifo").read_text()
    config = parse_config(text, source="other.yaml")
    with pytest.raises(ConfigError, match=r"tiers\[0\].eviction: other.yaml has fifo") as error:
        replay_calls(calls, config)
    assert "replay the recorded requests" in str(error.value)


def damaged(calls: Path, config: KvtierConfig, text: str) -> str:
    calls.write_text(text)
    with pytest.raises(TraceError) as error:
        replay_calls(calls, config)
    return str(error.value)


def test_a_damaged_recording_names_its_line(calls: Path) -> None:
    config = setup_of(4, 20).config
    lines = calls.read_text().splitlines()
    head = "\n".join(lines[:3])
    assert "calls-000001.jsonl:4: not JSON" in damaged(calls, config, f"{head}\n{{\n")
    assert "calls-000001.jsonl:4: not an object" in damaged(calls, config, f"{head}\n[]\n")
    unknown = '{"call":"no_such_call"}'
    assert "4: not a call that can be" in damaged(calls, config, f"{head}\n{unknown}\n")
    assert "1: not the beginning" in damaged(calls, config, lines[1] + "\n")
    newer = lines[0].replace('"kvtier_calls":3', '"kvtier_calls":4')
    assert "recorded in format 4" in damaged(calls, config, f"{newer}\n")


def test_a_recording_cut_short_is_one_of_a_shorter_run(calls: Path) -> None:
    config = setup_of(4, 20).config
    whole = replay_calls(calls, config).calls
    calls.write_bytes(calls.read_bytes()[:-5])
    assert replay_calls(calls, config).calls == whole - 1


def test_a_recording_of_calls_is_no_trace(calls: Path) -> None:
    with pytest.raises(TraceError, match="kvtier sim run --config"):
        read_trace(calls)


# -- writing


def keys(*numbers: int) -> list[ChunkKey]:
    return [make_key(number.to_bytes(32, "little"), 0) for number in numbers]


def lengths(directory: Path, stem: str) -> list[tuple[str, int]]:
    files = sorted(directory.glob(f"{stem}-*.jsonl"))
    return [(path.name, len(path.read_text().splitlines())) for path in files]


def recorder(directory: Path, **options: Any) -> Recorder:
    settings = TraceConfig(record=directory, **options)
    return Recorder(directory, options=settings, setup=setup_of(4, 20))


def test_requests_go_on_in_new_files_and_the_oldest_are_removed(tmp_path: Path) -> None:
    directory = tmp_path / "trace"
    record = RequestRecord(1.5, keys(1, 2), 1, 16)
    line = len(record.line())
    for _ in range(2):
        writer = recorder(directory, file_size_bytes=2 * line, files=2)
        for _ in range(5):
            writer.request(record)
        writer.close(timeout_s=10)
        assert writer.statistics() == recorder_module.RecorderStatistics(5, 0)
    assert lengths(directory, "requests") == [
        ("requests-000005.jsonl", 2),
        ("requests-000006.jsonl", 1),
    ]
    assert lengths(directory, "calls") == []
    assert directory.stat().st_mode & 0o777 == 0o700
    (first, *_) = directory.iterdir()
    assert first.stat().st_mode & 0o777 == 0o600
    trace = read_trace(directory / "requests-000005.jsonl")
    assert (trace.requests, trace.distinct, trace.chunk_tokens) == (2, 2, 16)
    assert trace.output_tokens.tolist() == [16, 16]


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A writing thread that waits before its first record until the event is set."""
    event = threading.Event()
    real = Recorder._guarded

    def guarded(self: Recorder, record: Any) -> None:
        assert event.wait(timeout=10)
        real(self, record)

    monkeypatch.setattr(Recorder, "_guarded", guarded)
    yield event
    event.set()


def test_a_full_queue_drops_requests_and_ends_the_recording_of_calls(
    tmp_path: Path, stopped: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    writer = recorder(tmp_path / "trace", calls=True, queue=4)
    for number in range(20):
        writer.call("begin_request", {"request": str(number)})
    assert writer.statistics().dropped >= 20 - 5
    assert caplog.text.count("trace.queue") == 1
    stopped.set()
    writer.close(timeout_s=10)
    counts = writer.statistics()
    assert counts.written + counts.dropped == 20
    ((_, recorded),) = lengths(tmp_path / "trace", "calls")
    assert recorded == 1 + counts.written
    writer.request(RequestRecord(0.0, keys(1), 0, 16))
    assert writer.statistics().dropped == counts.dropped + 1


def test_a_recording_of_calls_ends_whole_when_its_file_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = setup_of(4, 20)
    size = len(config.line()) + 80
    writer = recorder(tmp_path / "trace", calls=True, file_size_bytes=size)
    for number in range(50):
        writer.call("begin_request", {"request": str(number)})
    writer.close(timeout_s=10)
    counts = writer.statistics()
    assert counts.written == 2
    assert counts.dropped == 48
    assert caplog.text.count("has reached trace.file_size") == 1
    result = replay_calls(tmp_path / "trace/calls-000001.jsonl", config.config)
    assert result.requests == 2


def test_a_disk_that_fails_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "trace"
    writer = recorder(directory)
    directory.rmdir()
    for _ in range(3):
        writer.request(RequestRecord(0.0, keys(1), 0, 16))
    writer.close(timeout_s=10)
    assert writer.statistics() == recorder_module.RecorderStatistics(0, 3)
    (told,) = [each for each in caplog.records if "cannot write the rec" in each.getMessage()]
    assert told.exc_info is None, "a disk that fails is no bug"
    assert f"recording to {directory}, and it ends here: No such file" in told.getMessage()


def test_a_file_that_another_engine_writes_is_not_removed(tmp_path: Path) -> None:
    mine, other = (NumberedFiles(tmp_path, "requests", keep=1) for _ in range(2))
    other.write(b"other\n")
    for _ in range(3):
        mine.begin()
        mine.write(b"mine\n")
    other.flush()
    mine.flush()
    assert lengths(tmp_path, "requests") == [
        ("requests-000001.jsonl", 1),
        ("requests-000004.jsonl", 1),
    ]
    other.close()
    mine.begin()
    assert [path.name for path in tmp_path.iterdir()] == ["requests-000005.jsonl"]
    mine.close()


def test_two_engines_that_begin_a_file_at_once_get_one_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = (NumberedFiles(tmp_path, "requests", keep=2) for _ in range(2))
    numbers = NumberedFiles._numbers

    def look_while_the_other_begins(files: NumberedFiles) -> list[int]:
        found = numbers(files)
        monkeypatch.undo()
        other.begin()
        return found

    monkeypatch.setattr(NumberedFiles, "_numbers", look_while_the_other_begins)
    mine.begin()
    assert len(lengths(tmp_path, "requests")) == 2
    mine.close()
    other.close()


def test_closing_waits_for_a_disk_that_hangs_no_longer_than_it_may_and_says_so(
    tmp_path: Path,
    stopped: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = recorder(tmp_path / "trace")
    writer.request(RequestRecord(0.0, keys(1), 0, 16))
    now_s = 0.0
    waited_s: list[float] = []
    put_at_once = writer._waiting.put

    def put(record: Any, timeout: float) -> None:
        nonlocal now_s
        now_s += 6.0
        put_at_once(record, timeout=timeout)

    with monkeypatch.context() as patch:
        patch.setattr(recorder_module, "time", SimpleNamespace(monotonic=lambda: now_s))
        patch.setattr(writer._waiting, "put", put)
        patch.setattr(writer._thread, "join", waited_s.append)
        writer.close(timeout_s=8.0)
    assert waited_s == [2.0]
    assert caplog.text.count("the recording is incomplete") == 1
    stopped.set()
    writer._thread.join(10)
    assert writer.statistics().written == 1


# -- requests


def test_requests_are_written_in_order_of_arrival_whoever_ends_first() -> None:
    written: list[RequestRecord] = []
    log = RequestLog(written.append, chunk_tokens=16)
    for number, name in enumerate("abcd"):
        log.arrived(name, 100.0 + number)
        log.started(name, keys(number))
    log.ended("b", keys(1, 11, 12))
    log.ended("c", keys(2))
    assert written == []
    log.ended("a", keys(0))
    log.ended("a", keys(0))
    assert written == [
        RequestRecord(0.0, tuple(keys(0)), 0, 16),
        RequestRecord(1.0, tuple(keys(1)), 2, 16),
        RequestRecord(2.0, tuple(keys(2)), 0, 16),
    ]
    log.close()
    assert len(written) == 3


def test_a_request_that_never_ends_holds_up_a_bounded_number() -> None:
    written: list[RequestRecord] = []
    log = RequestLog(written.append, chunk_tokens=16, most_held=10)
    log.arrived("endless", 0.0)
    for number in range(50):
        log.arrived(str(number), float(number))
        log.started(str(number), keys(number))
        log.ended(str(number), keys(number))
        assert len(log._open) + len(log._over) <= 10
    log.close()
    assert [record.prompt for record in written] == [tuple(keys(at)) for at in range(50)]


def test_one_end_among_many_open_requests_is_one_record() -> None:
    written: list[RequestRecord] = []
    log = RequestLog(written.append, chunk_tokens=16, most_held=10)
    for number in range(100):
        log.arrived(str(number), float(number))
    log._open = Unscanned(log._open)
    for number in (40, 20, 30):
        log.ended(str(number), keys(number))
    assert [record.arrival_s for record in written] == [40.0, 20.0, 30.0]


class Unscanned(OrderedDict[str, Any]):
    """Refuses to show more than its first entry."""

    def values(self) -> Any:
        return islice(super().values(), 1)

    def items(self) -> Any:
        raise AssertionError("all open requests were looked at")


def test_every_request_of_an_id_that_is_used_again_is_written() -> None:
    written: list[RequestRecord] = []
    log = RequestLog(written.append, chunk_tokens=16)
    log.arrived("first", 0.0)
    for number in (1, 2):
        log.arrived("a", float(number))
        log.started("a", keys(number))
        log.ended("a", keys(number))
    log.ended("first", keys(0))
    assert [(record.arrival_s, record.prompt) for record in written] == [
        (float(number), tuple(keys(number))) for number in range(3)
    ]


def test_a_request_without_a_whole_chunk_is_not_written_and_one_aborted_early_is() -> None:
    written: list[RequestRecord] = []
    log = RequestLog(written.append, chunk_tokens=16)
    log.arrived("short", 0.0)
    log.ended("short", [])
    log.arrived("aborted", 1.0)
    log.ended("aborted", keys(5, 6))
    log.ended("unknown", keys(7))
    assert written == [RequestRecord(1.0, tuple(keys(5, 6)), 0, 16)]


# -- configuration


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("trace: {record: trace}", "f:2: trace.record = trace: not an absolute path"),
        ("trace: {calls: true}", "trace.calls = true: there is no recording; add record:"),
        ("trace: {files: 0}", "trace.files = 0: less than 1"),
        ("shadow: arc", "f:2: shadow = arc: not a list of policies; write shadow: [arc"),
        ("shadow: [acr]", "no such policy is installed"),
        ("shadow: [belady]", "must know the future"),
        ("shadow: [3]", "shadow[0] = 3: not text"),
        ("shadow: [arc, arc]", "a policy is named twice; name each once"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(f"tiers: [{{kind: ram, capacity: 1GiB}}]\n{text}\n", source="f")
    assert problem in str(error.value)


def test_a_recording_that_has_no_place_is_found_before_the_start(tmp_path: Path) -> None:
    place = tmp_path / "missing" / "trace"
    text = f"tiers: [{{kind: ram, capacity: 1MiB}}]\ntrace: {{record: {place}}}\n"
    with pytest.raises(ConfigError, match=r"f:2: trace.record = .*does not exist"):
        check_environment(parse_config(text, source="f"))
