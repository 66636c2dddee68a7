"""``kvtier replay``: batches, and a trace with real bytes through real tiers."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kvtier import replay as replay_package
from kvtier.cli import _replay as replay_command
from kvtier.cli._app import app
from kvtier.config import KvtierConfig, TierConfig, parse_config
from kvtier.errors import ConfigError, KvtierError
from kvtier.manager import CostModel, LoadChoice, SkipCause
from kvtier.memory.copy import BlockCopier
from kvtier.memory.copy_plan import BlockCopyPlan
from kvtier.memory.paged import PagedMemory
from kvtier.replay import ReplayOptions, ReplayResult, replay_trace
from kvtier.replay import _replay as replay_module
from kvtier.replay._batching import Batcher
from kvtier.replay._engine import ReplayEngine, WrongBytesError
from kvtier.replay._requests import ReplayRequest, make_requests, pick_requests
from kvtier.sim.cache import CacheResult, simulate_cache
from kvtier.sim.time_model import TierSpeed
from kvtier.sim.traces import Trace
from kvtier.tiers.base import TierContext
from kvtier.tiers.hosted.process import HostProcess
from tests.unit.recording_lru import PolicyCall, RecordingLru

CHUNK_NBYTES = 64 << 10
CHUNK_TOKENS = 128


def make_trace(
    chains: Sequence[Sequence[int]], *, apart_s: float = 0.005, sessions: Sequence[str] = ()
) -> Trace:
    count = len(chains)
    ids = np.array([chunk for chain in chains for chunk in chain], np.int64)
    return Trace(
        name="made",
        format="keys",
        sha256="",
        ids=ids,
        offsets=np.cumsum([0, *map(len, chains)]),
        timestamps_s=np.arange(count, dtype=np.float64) * apart_s,
        input_tokens=np.array([len(chain) * CHUNK_TOKENS for chain in chains]),
        output_tokens=np.full(count, 3),
        chunk_tokens=CHUNK_TOKENS,
        distinct=int(ids.max()) + 1,
        sessions=sessions,
    )


def tiers_config(
    tmp_path: Path, *, ram: int, nvme: int, own_process: bool = True, extra: str = ""
) -> KvtierConfig:
    return parse_config(
        f"tiers:\n- kind: ram\n  capacity: {ram * CHUNK_NBYTES}B\n  huge_pages: 'off'\n"
        f"- kind: nvme\n  path: {tmp_path / 'store'}\n  capacity: {nvme * CHUNK_NBYTES}B\n"
        f"  own_process: {str(own_process).lower()}\n"
        # How fast a busy machine is must not decide what a test loads.
        f"placement:\n  load_if: always\n{extra}",
        source="test",
    )


SPEEDS = {"nvme": TierSpeed(1e9, 1e9, 1e-3)}


def run(trace: Trace, config: KvtierConfig, **changes: Any) -> ReplayResult:
    options = ReplayOptions(
        **{
            "chunk_bytes": CHUNK_NBYTES,
            "gpu_bytes": 24 * CHUNK_NBYTES,
            "tokens_per_s": 200_000.0,
            "speeds": SPEEDS,
            **changes,
        }
    )
    return replay_trace(trace, config, options)


def shown(result: ReplayResult, tmp_path: Path, patch: pytest.MonkeyPatch) -> str:
    """Return what the command shows of a replay with this result, without line breaks."""
    trace, file = tmp_path / "made.jsonl", tmp_path / "kvtier.yaml"
    trace.write_text('{"timestamp": 0, "input_length": 256, "hash_ids": [0]}\n')
    file.write_text("tiers:\n- {kind: ram, capacity: 1MiB}\n")
    patch.setattr(replay_package, "replay_trace", lambda *_, **__: result)
    run = CliRunner().invoke(app, ["replay", str(trace), "--config", str(file)])
    assert run.exit_code == 0, run.output
    return " ".join(run.output.split())


class TestMemory:
    def test_a_block_holds_what_its_seed_says_and_nothing_else(self) -> None:
        memory = PagedMemory(layers=2, blocks=4, block_nbytes=1024)
        memory.fill([1, 3], [10, 30])
        assert memory.holds([3, 1], [30, 10])
        assert not memory.holds([1], [30])
        assert not memory.holds([2], [10])

    @pytest.mark.parametrize("byte", [0, 7, 100, 511])
    @pytest.mark.parametrize("layer", [0, 1])
    def test_every_byte_counts(self, layer: int, byte: int) -> None:
        memory = PagedMemory(layers=2, blocks=2, block_nbytes=1024)
        memory.fill([1], [10])
        memory.kv.tensors[layer][1, byte] ^= 1
        assert not memory.holds([1], [10])

    def test_layers_are_whole_words(self) -> None:
        with pytest.raises(ConfigError, match="multiple of 16 bytes"):
            PagedMemory(layers=2, blocks=2, block_nbytes=1000)


class SilentConnector:
    """A scheduler side that has nothing, but for what a test says."""

    def __init__(self) -> None:
        self.finished: list[str] = []
        self.stored_tokens = 0

    def on_new_request(self, request: ReplayRequest) -> None:
        pass

    def get_num_new_matched_tokens(
        self, request: ReplayRequest, computed: int
    ) -> tuple[int | None, bool]:
        return self.stored_tokens, bool(self.stored_tokens)

    def update_state_after_alloc(
        self, request: ReplayRequest, blocks: object, tokens: int
    ) -> None:
        pass

    def request_finished(self, request: ReplayRequest) -> None:
        self.finished.append(request.request_id)


class TestBatches:
    @staticmethod
    def batcher(**changes: int) -> tuple[Batcher, SilentConnector]:
        limits = {
            "blocks": 9,
            "block_tokens": 16,
            "step_tokens": 32,
            "concurrency": 8,
        } | changes
        connector: Any = SilentConnector()
        return Batcher(connector, **limits), connector

    @staticmethod
    def request(name: str, prompt: int, output: int) -> ReplayRequest:
        return ReplayRequest(name, 0.0, prompt, output, [b"\1" * 32] * (prompt // 16))

    def run(self, batcher: Batcher, steps: int) -> list[dict[str, int]]:
        batches = []
        for step in range(steps):
            batch = batcher.schedule()
            held = Counter(
                block for request in batcher.requests.values() for block in request.blocks
            )
            assert all(count == 1 for count in held.values())
            batches.append(dict(batch.num_scheduled_tokens))
            batcher.computed(batch, float(step))
        return batches

    def test_a_prompt_is_computed_in_pieces_and_its_last_one_is_the_first_token(self) -> None:
        batcher, connector = self.batcher()
        request = self.request("a", 80, 2)
        batcher.add(request)
        assert self.run(batcher, 4) == [{"a": 32}, {"a": 32}, {"a": 16}, {"a": 1}]
        assert request.first_token_s == 2.0
        assert connector.finished == ["a"]
        assert batcher.is_idle

    def test_running_requests_come_first_and_share_a_step_with_new_ones(self) -> None:
        batcher, _ = self.batcher()
        batcher.add(self.request("a", 16, 9))
        self.run(batcher, 1)
        batcher.add(self.request("b", 64, 1))
        assert self.run(batcher, 3) == [{"a": 1, "b": 31}, {"a": 1, "b": 31}, {"a": 1, "b": 2}]

    def test_loaded_ones_start_as_planned_before_those_that_wait(self) -> None:
        batcher, connector = self.batcher(blocks=40, step_tokens=16)
        for name in ("9", "10", "11"):
            batcher.add(self.request(name, 32, 1))
        connector.stored_tokens = 16
        assert self.run(batcher, 1) == [{}]
        connector.stored_tokens = 0
        batcher.add(self.request("12", 16, 1))
        batcher.loaded(["10", "11"], failed=())
        assert self.run(batcher, 1) == [{"10": 16}]
        batcher.loaded(["9"], failed=())
        assert self.run(batcher, 3) == [{"9": 16}, {"11": 16}, {"12": 16}]

    def test_the_connector_sees_what_starts_and_which_blocks_are_given_away(self) -> None:
        batcher, _ = self.batcher(blocks=5, step_tokens=64)
        batcher.add(self.request("a", 32, 20))
        batcher.add(self.request("b", 32, 20))
        first = batcher.schedule()
        assert (first.started, first.allocated) == (["a", "b"], {1, 2, 3, 4})
        held = batcher.get_blocks("b").blocks
        assert [block.block_id for block in held[0]] == [3, 4]
        assert batcher.get_blocks("unknown").blocks == ([],)
        batcher.computed(first, 0.0)
        second = batcher.schedule()
        assert (second.preempted, second.allocated) == (["b"], {3})
        self.run(batcher, 20)
        assert batcher.is_idle or "b" in batcher.requests

    def test_the_last_request_is_preempted_when_blocks_run_out(self) -> None:
        batcher, connector = self.batcher(blocks=5, step_tokens=64)
        first, last = self.request("a", 32, 20), self.request("b", 32, 20)
        batcher.add(first)
        batcher.add(last)
        self.run(batcher, 2)
        assert batcher.preemptions == 1
        assert last.blocks == []
        self.run(batcher, 45)
        assert connector.finished == ["a", "b"]


class TestRequests:
    def test_equal_prefixes_have_equal_hashes(self) -> None:
        trace = make_trace([[0, 1, 2], [0, 1, 3]])
        first, second = make_requests(trace, blocks_per_chunk=2)
        assert first.block_hashes[:4] == second.block_hashes[:4]
        assert not set(first.block_hashes[4:]) & set(second.block_hashes[4:])
        assert first.output_tokens == 3
        assert second.arrival_s > first.arrival_s

    def test_some_of_the_requests_are_a_trace(self) -> None:
        trace = pick_requests(make_trace([[0, 1], [0, 2], [5]]), range(2))
        assert trace.chains() == [[0, 1], [0, 2]]
        assert (trace.requests, trace.refs, trace.distinct) == (2, 4, 3)


class TestReplay:
    @pytest.mark.parametrize("own_process", [True, False], ids=["hosted", "in-process"])
    def test_every_prefix_that_is_kept_is_loaded_bit_for_bit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_process: bool
    ) -> None:
        hosts: list[str] = []
        start = HostProcess.start

        def note(options: TierConfig, context: TierContext) -> Any:
            hosts.append(options.name)
            return start(options, context)

        monkeypatch.setattr(HostProcess, "start", note)
        chains = [[number, 100 + number, 200 + number] for number in range(8)] * 3
        config = tiers_config(tmp_path, ram=8, nvme=64, own_process=own_process)
        result = run(make_trace(chains, apart_s=0.05), config)
        assert hosts == (["nvme"] if own_process else [])
        assert result.requests == 24
        # How many depends on how busy the machine is: a chunk is asked for again by the clock.
        assert 0 < result.counts.loaded_blocks <= 16 * 3
        assert result.counts.loaded_tokens == result.counts.loaded_blocks * CHUNK_TOKENS
        ram, nvme = result.tiers
        assert ram.hits + nvme.hits == result.counts.loaded_blocks
        assert nvme.hits > 0
        # Several requests may load a chunk while it comes up, which is read once for all.
        assert nvme.read_bytes >= CHUNK_NBYTES
        assert nvme.read_bytes % CHUNK_NBYTES == 0
        assert 0 < nvme.written_bytes <= 24 * CHUNK_NBYTES
        assert result.predicted.total_hit_ratio == pytest.approx(2 / 3)
        assert result.ttft_s["p50"] <= result.ttft_s["p99"]
        assert not list(tmp_path.iterdir()), "the stores are gone"

    def test_a_renamed_ram_tier_reports_its_transfers(self, tmp_path: Path) -> None:
        tiers = (
            f"tiers:\n- kind: ram\n  name: host\n  capacity: {8 * CHUNK_NBYTES}B\n"
            "  huge_pages: 'off'\nplacement:\n  load_if: always\n"
        )
        result = run(make_trace([[0, 1], [0, 1]]), parse_config(tiers, source="test"))
        (host,) = result.tiers
        assert host.name == "host"
        assert host.written_bytes == 2 * CHUNK_NBYTES

    @pytest.mark.parametrize("load_path", ["staged", "direct"])
    def test_chunks_of_several_blocks_and_a_small_memory(
        self, tmp_path: Path, load_path: str
    ) -> None:
        extra = f"engine:\n  blocks_per_chunk: 4\ntransfer:\n  load_path: {load_path}\n"
        chains = [[number % 5, 10 + number % 5, 20 + number] for number in range(30)]
        result = run(
            make_trace(chains, apart_s=0.001),
            tiers_config(tmp_path, ram=6, nvme=64, extra=extra),
            gpu_bytes=8 * CHUNK_NBYTES,
        )
        assert result.requests == 30
        assert result.counts.loaded_blocks % 4 == 0
        assert result.hit_ratio > 0  # how much is stored in time is the machine's business
        assert result.counts.failed_loads == 0

    def test_policies_see_sessions_in_replay_and_simulation(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        live: list[PolicyCall] = []

        def simulate(*args: Any, **options: Any) -> CacheResult:
            live.extend(RecordingLru.calls)
            RecordingLru.calls.clear()
            return simulate_cache(*args, **options)

        monkeypatch.setattr(replay_module, "simulate_cache", simulate)
        RecordingLru.calls.clear()
        long = "x" * 1000
        sessions = ["a", "b", "", long + "1", long + "2", "a"]
        # Each has a chunk of its own, so that the policy hears of it however late a store is.
        trace = make_trace([[0, number] for number in range(1, 7)], sessions=sessions)
        policy = f"{RecordingLru.__module__}:{RecordingLru.__name__}"
        config = tiers_config(tmp_path, ram=16, nvme=16)
        ram = config.ram.model_copy(update={"eviction": policy})
        run(trace, config.model_copy(update={"tiers": (ram,)}))
        named = [
            {call.request: call.session for call in half} for half in (live, RecordingLru.calls)
        ]
        assert named[0] == named[1]
        assert [named[0][str(number)] for number in (0, 1, 2, 5)] == ["a", "b", "", "a"]
        assert len({named[0]["3"], named[0]["4"], ""}) == 3

    def test_skipped_loads_are_reported(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def estimate(cost_model: CostModel, sources: Sequence[int], **_: Any) -> LoadChoice:
            chunks = len(sources)
            cause = SkipCause.SLOWER
            return LoadChoice(cause, 0, CHUNK_TOKENS, {1: chunks}, 0, 1.0, 0.1, 0, 0, 8.0)

        monkeypatch.setattr(CostModel, "choose", estimate)
        chains = [[number, 100 + number, 200 + number] for number in range(8)] * 2
        extra = "transfer:\n  load_path: staged\n"
        result = run(
            make_trace(chains, apart_s=0.05),
            tiers_config(tmp_path, ram=8, nvme=64, extra=extra),
        )
        ram, nvme = result.tiers
        assert (ram.skipped_chunks, nvme.hits) == (0, 0)
        assert nvme.skipped_chunks > 0
        remark = f"{nvme.skipped_chunks} chunks of nvme were computed, because"
        assert remark in shown(result, tmp_path, monkeypatch)

    def test_bytes_that_are_not_those_stored_end_the_replay(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load = BlockCopier.load

        def load_and_spoil(self: BlockCopier, plan: BlockCopyPlan, *, after: Any) -> None:
            load(self, plan, after=after)
            block = torch.from_numpy(plan.groups[0].blocks)[-1]
            memories[0].kv.tensors[-1][block, -1] ^= 1

        memories: list[PagedMemory] = []

        def make(**shape: int) -> PagedMemory:
            memories.append(PagedMemory(**shape))
            return memories[-1]

        monkeypatch.setattr(replay_module, "PagedMemory", make)
        monkeypatch.setattr(BlockCopier, "load", load_and_spoil)
        with pytest.raises(WrongBytesError, match="a load returned other bytes"):
            run(
                make_trace([[0, 1], [0, 1]], apart_s=0.2),
                tiers_config(tmp_path, ram=8, nvme=16),
            )
        assert not list(tmp_path.iterdir())

    def test_prompts_longer_than_the_memory_are_left_out_and_counted(
        self, tmp_path: Path
    ) -> None:
        trace = make_trace([[0, 1], list(range(2, 40)), [0, 1]], apart_s=0.1)
        result = run(trace, tiers_config(tmp_path, ram=8, nvme=16))
        assert (result.requests, result.skipped_requests) == (2, 1)
        assert result.refs == 4

    def test_a_memory_too_small_for_every_prompt_says_what_it_should_be(
        self, tmp_path: Path
    ) -> None:
        trace = make_trace([list(range(60)), list(range(40))])
        with pytest.raises(ConfigError, match=r"the shortest takes .*: raise --gpu-memory"):
            run(trace, tiers_config(tmp_path, ram=8, nvme=16))
        assert not list(tmp_path.iterdir())

    def test_a_replay_records_nothing_and_runs_no_shadows(self, tmp_path: Path) -> None:
        record = tmp_path / "recording"
        extra = f"trace: {{record: {record}}}\nshadow: [lru]\n"
        result = run(make_trace([[0, 1]]), tiers_config(tmp_path, ram=8, nvme=16, extra=extra))
        assert result.requests == 1
        assert not list(tmp_path.iterdir()), "a recording is a live engine's"

    def test_a_replay_that_is_asked_to_end_takes_its_stores_along(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        places = tmp_path / "places"
        places.mkdir()
        seen: list[Path] = []

        def serve(*_: object, **__: object) -> None:
            seen.extend(places.glob(".kvtier-replay-*/store/*/slots.bin"))
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("it went on")

        monkeypatch.setattr(ReplayEngine, "serve", serve)
        trace = tmp_path / "made.jsonl"
        trace.write_text('{"timestamp": 0, "input_length": 256, "hash_ids": [0]}\n')
        file = tmp_path / "kvtier.yaml"
        file.write_text(
            "tiers:\n- {kind: ram, capacity: 1MiB}\n"
            f"- {{kind: nvme, path: {places / 'store'}, capacity: 4MiB}}\n"
        )
        arguments = [
            *("replay", str(trace), "--config", str(file), "--chunk-bytes", "64KiB"),
            *("--tier-speed", "nvme=1GB/s,1GB/s,1ms", "--gpu-memory", "2MiB"),
        ]
        ended = CliRunner().invoke(app, arguments)
        assert (ended.exit_code, len(seen)) == (128 + signal.SIGTERM, 1)
        assert list(places.iterdir()) == []
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def test_chunks_that_cannot_be_cut_into_blocks_are_an_error(self, tmp_path: Path) -> None:
        config = tiers_config(
            tmp_path, ram=8, nvme=16, extra="engine:\n  blocks_per_chunk: 3\n"
        )
        with pytest.raises(ConfigError, match="blocks_per_chunk = 3"):
            run(make_trace([[0]]), config)

    def test_copies_that_fail_have_no_speed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise OSError(5, "no")

        monkeypatch.setattr(BlockCopier, "load", fail)
        with pytest.raises(KvtierError, match="a load between RAM slots and blocks"):
            run(make_trace([[1]]), tiers_config(tmp_path, ram=4, nvme=16))

    def test_the_speed_of_ram_is_measured_and_cannot_be_set(self, tmp_path: Path) -> None:
        trace = tmp_path / "made.jsonl"
        trace.write_text('{"timestamp": 0, "input_length": 256, "hash_ids": [0]}\n')
        file = tmp_path / "kvtier.yaml"
        file.write_text("tiers:\n- {kind: ram, capacity: 1MiB, name: fast}\n")
        arguments = ["replay", str(trace), "--config", str(file)]
        speed = ["--tier-speed", "fast=1GB/s,1GB/s,1ms"]
        refused = CliRunner().invoke(app, [*arguments, *speed])
        assert isinstance(refused.exception, ConfigError)
        assert str(refused.exception) == (
            "--tier-speed fast: copies between RAM and the KV memory are always measured; "
            "leave it out"
        )

    def test_a_path_beside_which_no_store_can_be_is_named(self, tmp_path: Path) -> None:
        trace = tmp_path / "made.jsonl"
        trace.write_text('{"timestamp": 0, "input_length": 256, "hash_ids": [0]}\n')
        file, path = tmp_path / "kvtier.yaml", tmp_path / "nowhere/store"
        file.write_text(
            "tiers:\n- {kind: ram, capacity: 1MiB}\n"
            f"- {{kind: nvme, path: {path}, capacity: 4MiB}}\n"
        )
        refused = CliRunner().invoke(app, ["replay", str(trace), "--config", str(file)])
        assert isinstance(refused.exception, ConfigError)
        words = str(refused.exception)
        assert words.startswith(f"{file}:3: tiers[1].path = ")
        assert words.endswith(
            f": the replay cannot write its caches to {path.parent}; name a directory whose "
            "parent you may write to"
        )

    def test_the_command_shows_both_and_how_far_they_are_apart(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trace = tmp_path / "made.jsonl"
        trace.write_text(
            "".join(
                f'{{"timestamp": {at * 200}, "input_length": 256, "output_length": 1, '
                '"hash_ids": [0, 1], "block_tokens": 128}\n'
                for at in range(4)
            )
        )
        file = tmp_path / "kvtier.yaml"
        file.write_text(
            "tiers:\n- {kind: ram, capacity: 1MiB}\n"
            f"- {{kind: nvme, path: {tmp_path / 'store'}, capacity: 4MiB}}\n"
            "placement: {load_if: always}\n"
        )
        arguments = [
            *("replay", str(trace), "--config", str(file), "--chunk-bytes", "64KiB"),
            *("--tier-speed", "nvme=1GB/s,1GB/s,1ms", "--gpu-memory", "2MiB"),
            *("--prefill-rate", "200000"),
        ]
        monkeypatch.setattr(replay_command, "_LATE", -1.0)
        shown = CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments)
        assert shown.exit_code == 0, shown.output
        assert "longer than the model would" in " ".join(shown.output.split())
        assert "tokens per id: 128 (block_tokens of the records)" in " ".join(
            shown.output.split()
        )
        assert max(map(len, shown.output.splitlines())) <= 80
        assert "TTFT p50, ms" in shown.output
        assert "blocks loaded, every byte equal to the stored one" in shown.output
        document = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
        assert document["requests"] == 4
        assert document["counts"].keys() >= {
            "loaded_blocks",
            "late_s",
        }  # a store may be late, by the clock
        assert set(document["apart"]) == {"p50", "p90", "p99", "hit_ratio"}
        assert document["predicted"]["load_path"] == "direct"
