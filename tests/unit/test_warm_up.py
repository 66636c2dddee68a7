"""``kvtier warmup`` over an engine without a model and a real store."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.config import load_config
from kvtier.errors import ConfigError
from kvtier.tiers.slab.index_reader import IndexReader
from kvtier.tiers.slab.inspect import find_namespaces
from kvtier.tiers.slab.schema import IndexMissingError
from kvtier.warmup import (
    Finished,
    LineSkipped,
    Planned,
    Progress,
    WarmupEvent,
    WarmupJob,
    WarmupOptions,
    WarmupReport,
)
from kvtier.warmup import _offline as offline
from tests.unit.warm_up_engine import BLOCK, MODEL, SLOT, World

SHARED = list(range(2 * BLOCK))


def ids(*own: int) -> dict[str, Any]:
    """Return a line of two shared blocks and one block for each of ``own``."""
    blocks = [token for each in own for token in [each] * BLOCK]
    return {"prompt_token_ids": [*SHARED, *blocks, 1]}


class Site:
    """A configuration, a file of prompts, and a store."""

    def __init__(self, directory: Path, *, slots: int = 64) -> None:
        self.store = directory / "store"
        self.prompts = directory / "prompts.jsonl"
        self.file = directory / "kvtier.yaml"
        self.file.write_text(
            "tiers:\n"
            "  - {kind: ram, capacity: 1MiB}\n"
            f"  - {{kind: nvme, path: {self.store}, capacity: {slots * SLOT >> 10}KiB}}\n"
            "placement: {write: evict, admit: second-touch}\n"
            f"trace: {{record: {directory}/trace}}\n"
            "shadow: [lru]\n"
        )

    def write(self, lines: Sequence[Mapping[str, Any] | str]) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.prompts.write_text("".join(f"{text}\n" for text in texts))

    def job(
        self,
        world: World,
        arguments: Sequence[str] = (),
        *,
        model: str = MODEL,
        **options: Any,
    ) -> WarmupJob:
        return WarmupJob(
            self.file,
            model=model,
            prompts=self.prompts,
            arguments=arguments,
            options=WarmupOptions(**options),
            open_engine=world.open,
        )

    def stored(self) -> set[bytes]:
        """Return the keys of all chunks in the store."""
        found: set[bytes] = set()
        for space in find_namespaces(self.store):
            with contextlib.suppress(IndexMissingError), IndexReader(space) as reader:
                for keys in reader.all_keys():
                    found.update(keys)
        return found


@pytest.fixture(autouse=True)
def _disks_are_measured_in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "_MEASURE_S", 0.01)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture
def world() -> World:
    return World()


async def take(job: WarmupJob) -> list[WarmupEvent]:
    return [event async for event in job]


def events_of(job: WarmupJob) -> list[WarmupEvent]:
    return asyncio.run(take(job))


def report_of(job: WarmupJob) -> WarmupReport:
    last = events_of(job)[-1]
    assert isinstance(last, Finished)
    return last.report


def test_every_prompt_is_stored_and_a_shared_prefix_is_computed_once(
    site: Site, world: World
) -> None:
    site.write([ids(10), ids(11), ids(10, 12)])
    report = report_of(site.job(world))
    assert report.is_complete
    assert report.prompts == 3
    assert report.computed_tokens == 5 * BLOCK + 3 == report.planned.tokens
    assert report.coverage is not None
    assert report.coverage.whole == 3
    assert report.coverage.share == 1
    assert report.planned.nbytes == 5 * SLOT
    assert len(site.stored()) == 5
    assert world.running == 0


def test_the_events_come_in_the_order_of_the_work(site: Site, world: World) -> None:
    site.write([ids(10), ids(11)])
    kinds = [type(event) for event in events_of(site.job(world))]
    assert list(dict.fromkeys(kinds)) == [Planned, Progress, Finished]


def test_a_second_run_computes_only_what_is_new(site: Site, world: World) -> None:
    site.write([ids(10), ids(11)])
    report_of(site.job(world))
    site.write([ids(10), ids(11), ids(13)])
    world.computed.clear()
    report = report_of(site.job(world))
    assert world.computed == {3: BLOCK}
    assert (report.planned.stored, report.planned.prompts) == (2, 1)
    assert report.is_complete
    assert [each.chunks for each in report.verified] == [1]


def test_a_cancelled_run_ends_the_engine_and_the_next_one_goes_on(
    site: Site, world: World
) -> None:
    lines = [ids(number) for number in range(20, 40)]
    site.write(lines)

    async def cancel_after_five() -> None:
        task = asyncio.create_task(take(site.job(world)))
        loop = asyncio.get_running_loop()

        def cancel(ended: int) -> None:
            if ended == 5:
                loop.call_soon_threadsafe(task.cancel)
                while not task.cancelling():
                    pass

        world.on_step = cancel
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_after_five())
    assert world.running == 0
    first = dict(world.computed)
    assert 5 <= len(first) < 20
    world.computed.clear()
    world.on_step = lambda _: None
    report = report_of(site.job(world))
    assert report.is_complete
    assert not first.keys() & world.computed.keys()
    assert len(site.stored()) == 22


def test_a_job_that_is_no_longer_followed_ends_its_engine(site: Site, world: World) -> None:
    site.write([ids(10)])

    async def stop_following() -> None:
        async with aclosing(site.job(world).__aiter__()) as events:
            async for event in events:
                if isinstance(event, Planned):
                    break

    asyncio.run(stop_following())
    assert (world.started, world.running) == (1, 0)


def test_an_engine_that_fails_is_ended_and_its_error_raised(site: Site, world: World) -> None:
    def fail(_: int) -> None:
        raise RuntimeError("out of memory")

    world.on_step = fail
    site.write([ids(10)])
    with pytest.raises(RuntimeError, match="out of memory"):
        events_of(site.job(world))
    assert world.running == 0


def test_an_engine_that_cannot_drop_its_prompts_is_ended(site: Site, world: World) -> None:
    def fail() -> None:
        raise RuntimeError("no such request")

    world.on_abort = fail
    site.write([ids(10)])
    with pytest.raises(RuntimeError, match="no such request"):
        events_of(site.job(world))
    assert (world.started, world.running) == (1, 0)


def test_prompts_beyond_the_budget_are_left_out_those_of_low_priority_first(
    site: Site, world: World
) -> None:
    site.write([ids(10) | {"priority": 1}, ids(11), ids(12)])
    report = report_of(site.job(world, budget_bytes=4 * SLOT))
    assert sorted(world.computed) == [2, 3]
    assert report.planned.left_out == 1
    assert len(site.stored()) == 4
    assert report.is_complete


def test_no_more_is_computed_than_a_tier_holds(tmp_path: Path, world: World) -> None:
    site = Site(tmp_path, slots=8)
    site.write([ids(number) for number in range(20, 40)])
    report = report_of(site.job(world))
    assert report.planned.left_out == 14
    assert len(site.stored()) == 8


def test_a_prompt_that_another_contains_is_not_computed_twice(site: Site, world: World) -> None:
    site.write([ids(10, 11), ids(10, 11), {"prompt_token_ids": [1, 2]}])
    report = report_of(site.job(world))
    assert (report.planned.prompts, report.planned.shared, report.planned.short) == (1, 1, 1)
    assert report.is_complete


def test_prompts_of_other_salts_and_adapters_share_nothing(site: Site, world: World) -> None:
    site.write([ids(10), ids(10) | {"cache_salt": "a"}, ids(10) | {"lora": "fr"}])
    report = report_of(site.job(world, ["fr=/adapters/fr"]))
    assert report.is_complete
    assert len(site.stored()) == 9
    assert {len(key) % 2 for key in site.stored()} == {0, 1}
    assert report_of(site.job(world, ["fr=/adapters/fr"])).planned.stored == 3


def test_texts_and_conversations_become_the_tokens_of_the_engine(
    site: Site, world: World
) -> None:
    messages = [{"role": "user", "content": "a long question"}]
    site.write([{"prompt": "a long question"}, {"messages": messages}])
    report = report_of(site.job(world))
    assert (report.planned.tokens, report.planned.shared) == (15, 1)
    assert report.is_complete


CONTENTS = "write one of prompt, prompt_token_ids, messages"
BAD = {
    "{": (
        f"not JSON (Expecting property name enclosed in double quotes); {CONTENTS} in an object"
    ),
    "[1]": f"not an object; {CONTENTS} in one",
    "": "empty; remove the line",
    "{}": f"has no prompt; {CONTENTS}",
    '{"prompt": "a", "messages": [{}]}': f"has prompt and messages; {CONTENTS}",
    '{"prompt": ""}': "prompt: string should have at least 1 character",
    '{"prompt": "a", "cache_slat": "b"}': (
        f"cache_slat: no such key; {CONTENTS}, tools, chat_template_kwargs, cache_salt, lora, "
        "priority; did you mean cache_salt?"
    ),
    '{"prompt_token_ids": [1, -2]}': (
        "prompt_token_ids.1: input should be greater than or equal to 0"
    ),
    '{"prompt": "a", "tools": [{}]}': (
        "tools and chat_template_kwargs belong to messages; leave them out"
    ),
    '{"prompt": "unspeakable"}': "vLLM: no token for this",
    '{"prompt": "' + "a" * 65 + '"}': (
        "too long: 65 tokens; the engine takes 64; shorten it, or raise --max-model-len"
    ),
    '{"prompt_token_ids": [256]}': (
        "prompt_token_ids: 256 is no token of the model; the model's token ids end at 255"
    ),
    '{"prompt": "a", "lora": "de"}': (
        "lora: de is no adapter; add it to the engine: --lora-modules de=PATH"
    ),
}


@pytest.mark.parametrize(("line", "problem"), BAD.items(), ids=[each[:24] for each in BAD])
def test_a_line_that_is_no_prompt_is_named_with_its_number(
    site: Site, world: World, line: str, problem: str
) -> None:
    site.write([ids(10), line, ids(11)])
    with pytest.raises(ConfigError) as refusal:
        events_of(site.job(world))
    assert str(refusal.value) == f"{site.prompts}:2: {problem}"
    assert world.started == 0
    events = events_of(site.job(world, skip_bad_lines=True))
    (skipped,) = [event.bad for event in events if isinstance(event, LineSkipped)]
    assert (skipped.line, skipped.problem) == (2, problem)
    assert sorted(world.computed) == [1, 3]


def test_a_file_without_a_prompt_is_refused(site: Site, world: World) -> None:
    site.write(["", ""])
    with pytest.raises(ConfigError, match="has no usable prompt; write one a line"):
        events_of(site.job(world))


def test_a_missing_file_is_named(site: Site, world: World) -> None:
    with pytest.raises(ConfigError, match=r"prompts\.jsonl: no such file; check the path"):
        events_of(site.job(world))


def test_a_prompt_that_the_engine_refuses_is_reported_with_its_line(
    site: Site, world: World
) -> None:
    world.refused.add(2)
    site.write([ids(10), ids(11)])
    report = report_of(site.job(world))
    assert [(bad.line, bad.problem) for bad in report.failed] == [(2, "no")]
    assert not report.is_complete


def test_an_engine_that_only_writes_sleeps_between_steps_also_after_a_refusal(
    site: Site, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.refused.add(2)
    world.unwritten = 1
    steps = iter(range(100))

    def sleep(_: float) -> None:
        world.unwritten = 0  # the tiers' threads run meanwhile

    monkeypatch.setattr(offline, "time", SimpleNamespace(sleep=sleep))
    world.on_step = lambda _: assert_few(next(steps, None))
    site.write([ids(10), ids(11)])
    assert [bad.line for bad in report_of(site.job(world)).failed] == [2]


def assert_few(step: int | None) -> None:
    assert step is not None, "the engine never sleeps"


def test_a_dry_run_plans_without_an_engine(site: Site, world: World) -> None:
    site.write([ids(10), ids(11)])
    *_, planned = events_of(site.job(world, dry_run=True))
    assert isinstance(planned, Planned)
    assert (planned.prompts, planned.tokens, planned.nbytes) == (2, 4 * BLOCK + 2, None)
    assert world.started == 0
    report_of(site.job(world))
    site.write([ids(10), ids(13)])
    *_, planned = events_of(site.job(world, dry_run=True))
    assert isinstance(planned, Planned)
    assert (planned.prompts, planned.stored, planned.nbytes) == (1, 1, SLOT)
    assert world.started == 1


def plan_of(job: WarmupJob) -> Planned:
    last = events_of(job)[-1]
    assert isinstance(last, Planned)
    return last


def test_a_dry_run_of_token_ids_on_a_known_cache_needs_no_vllm(
    site: Site, world: World
) -> None:
    site.write([ids(10)])
    report_of(site.job(world))
    world.opened = 0
    assert plan_of(site.job(world, dry_run=True)).stored == 1
    assert world.opened == 0
    site.write([{"prompt": "a text"}])
    plan_of(site.job(world, dry_run=True))
    assert world.opened == 1


def test_a_dry_run_names_the_arguments_that_differ_from_the_deployment(
    site: Site, world: World
) -> None:
    site.write([ids(10)])
    report_of(site.job(world))
    other = World(known={"kv_dtype": "fp8", "tokens_per_hash": 2 * BLOCK})
    with pytest.raises(ConfigError) as refusal:
        events_of(site.job(other, ["fr=/adapters/fr"], dry_run=True))
    assert "kv_dtype is 'bfloat16' there and 'fp8' here, tokens_per_hash is 4 there" in str(
        refusal.value
    )
    assert other.started == 0


def test_a_dry_run_keeps_to_the_budget(site: Site, world: World, tmp_path: Path) -> None:
    site.write([ids(10), ids(11), ids(12)])
    with pytest.raises(ConfigError, match="--budget: the size of a chunk is unknown before"):
        plan_of(site.job(world, dry_run=True, budget_bytes=4 * SLOT))
    shape = {
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "hidden_size": 512,
        "dtype": "bfloat16",
    }
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(shape))
    new = plan_of(site.job(world, model=str(model), dry_run=True, budget_bytes=8 * SLOT))
    assert (new.prompts, new.left_out, new.nbytes) == (2, 1, 8 * SLOT)
    report_of(site.job(world, budget_bytes=3 * SLOT))
    known = plan_of(site.job(world, dry_run=True, budget_bytes=SLOT))
    assert (known.stored, known.prompts, known.left_out) == (1, 1, 1)


def test_a_prompt_of_less_than_a_chunk_is_too_short_and_covers_nothing(
    site: Site, world: World
) -> None:
    site.write([{"prompt_token_ids": [1, 2]}])
    report = report_of(site.job(world))
    assert report.coverage is not None
    assert (report.coverage.short, report.coverage.whole, report.coverage.share) == (1, 0, 0.0)
    assert report.is_complete


def test_the_engine_does_not_see_the_signals_of_a_terminal(site: Site, world: World) -> None:
    blocked: set[int] = set()
    world.on_start = lambda: blocked.update(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    site.write([ids(10)])
    report_of(site.job(world))
    assert {signal.SIGINT, signal.SIGHUP} <= blocked
    assert signal.SIGTERM not in blocked


def test_a_step_that_fails_in_a_cancelled_run_is_reported_as_the_cancellation_alone(
    site: Site, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    site.write([ids(number) for number in range(20, 40)])

    async def cancel() -> None:
        task = asyncio.create_task(take(site.job(world)))
        loop = asyncio.get_running_loop()

        def fail(_: int) -> None:
            loop.call_soon_threadsafe(task.cancel)
            while not task.cancelling():
                pass
            raise RuntimeError("cancelled")

        world.on_step = fail
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    gc.collect()
    assert "never retrieved" not in caplog.text
    assert world.running == 0


def test_a_warm_up_leaves_no_file_but_the_store(site: Site, world: World) -> None:
    seen: list[bool] = []
    files: list[Path] = []

    def look(_: int) -> None:
        extra = world.transfers[0]["kv_connector_extra_config"]
        files.append(Path(extra["kvtier_config"]))
        seen.append(files[0].exists())

    world.on_step = look
    site.write([ids(10)])
    report_of(site.job(world))
    assert all(seen)
    assert not files[0].exists()
    assert not files[0].is_relative_to(tempfile.gettempdir())


def test_a_tier_of_another_package_is_warmed_up_if_it_has_a_directory(
    site: Site, world: World
) -> None:
    other = "kind: kvtier.testing.file_tier:FileTier"
    site.file.write_text(site.file.read_text().replace("kind: nvme", other))
    site.write([ids(10)])
    plan = plan_of(site.job(world, dry_run=True))
    assert (plan.prompts, plan.nbytes) == (1, None)


def test_an_engine_of_other_settings_than_the_deployment_computes_nothing(
    site: Site, world: World
) -> None:
    site.write([ids(10)])
    report_of(site.job(world))
    transfer = {"kv_connector_extra_config": {"kvtier_config": str(site.file)}}
    deployed = world.open(MODEL, [], transfer).start()  # its cache cannot be removed now
    other = World(layout={"kv_dtype": "fp8"})
    with pytest.raises(ConfigError) as refusal:
        events_of(site.job(other))
    assert "kv_dtype is 'bfloat16' there and 'fp8' here; give the arguments of the" in str(
        refusal.value
    )
    assert not other.computed
    assert (other.started, other.running) == (1, 0)
    assert report_of(site.job(other, new_cache=True)).is_complete
    assert report_of(site.job(other)).planned.stored == 1
    deployed.close()


def test_an_engine_of_other_settings_does_not_remove_the_cache_of_the_deployment(
    site: Site, world: World
) -> None:
    site.write([ids(10)])
    report_of(site.job(world))
    text = site.file.read_text()
    site.file.write_text(text.replace("kind: nvme", "kind: nvme, on_mismatch: remove"))
    other = World(layout={"kv_dtype": "fp8"})
    with pytest.raises(ConfigError, match="kv_dtype is 'bfloat16' there and 'fp8' here"):
        events_of(site.job(other))
    assert len(site.stored()) == 3
    assert report_of(site.job(other, new_cache=True)).is_complete


def test_a_file_of_other_settings_than_the_deployment_starts_no_engine(
    site: Site, world: World
) -> None:
    site.write([ids(10)])
    report_of(site.job(world))
    with site.file.open("a") as file:
        file.write("engine: {blocks_per_chunk: 2}\n")
    with pytest.raises(ConfigError, match="blocks_per_chunk is 1 there and 2 here"):
        events_of(site.job(world))
    assert world.started == 1


def test_the_engine_sends_everything_to_the_disk_and_records_nothing(
    site: Site, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def look(_: int) -> None:
        extra = world.transfers[0]["kv_connector_extra_config"]
        seen.append(load_config(extra["kvtier_config"]))

    world.on_step = look
    site.write([ids(10)])
    report_of(site.job(world))
    placement = seen[0].placement
    assert (placement.write, placement.admit, placement.load_if) == ("through", "all", "always")
    assert (seen[0].trace.record, seen[0].shadow) == (None, ())


def test_a_python_without_memfd_create_warms_up_too(
    site: Site, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    site.write([ids(10)])
    assert report_of(site.job(world)).is_complete


def test_without_a_persistent_tier_there_is_nothing_to_warm(site: Site, world: World) -> None:
    site.file.write_text("tiers: [{kind: ram, capacity: 1MiB}]\n")
    site.write([ids(10)])
    with pytest.raises(
        ConfigError,
        match="keeps chunks in a directory after the warm-up's engine ends; add one that",
    ):
        events_of(site.job(world))


def test_a_reset_store_counts_as_empty(site: Site, world: World) -> None:
    site.write([ids(10)])
    report_of(site.job(world))
    (space,) = find_namespaces(site.store)
    with sqlite3.connect(space.index_path) as index:
        index.execute("INSERT INTO meta VALUES ('reset', '0')")
    index.close()
    *_, planned = events_of(site.job(world, dry_run=True))
    assert isinstance(planned, Planned)
    assert planned.stored == 0
