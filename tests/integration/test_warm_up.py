"""``kvtier warmup`` with vLLM: what it stores, a server with the same arguments loads."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from kvtier.coverage import BlockHasher, Scope
from kvtier.errors import ConfigError
from kvtier.tiers.slab.index_reader import IndexReader
from kvtier.tiers.slab.inspect import find_namespaces
from kvtier.vllm.offline import OfflineSetup
from kvtier.warmup import Finished, WarmupJob, WarmupOptions, WarmupReport
from tests.demo.model import BLOCK_TOKENS, write_model
from tests.demo.runner import ROOT, SETTINGS, run_engine
from tests.demo.scenario import Prompt, Wave
from tests.docs.pages import DOCS, blocks_of
from tests.integration.harness import Reference, Site
from tests.integration.preloaded import Program
from tests.integration.serving import Server, first_scrape, serving

PROMPTS = 64
ARGUMENTS = (
    *("--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"),
    *("--block-size", str(BLOCK_TOKENS), "--seed", "0", "--max-model-len", "4096"),
    *("--num-gpu-blocks-override", "140"),
)
RUN_S = 600.0
LOOK_S = 0.002


def prompts_of(reference: Reference) -> list[Prompt]:
    """Return 64 prompts with shared prefixes, the answers to which are known."""
    first, second, *_ = reference.conversations
    return [*first.prompts, *second.prompts][:PROMPTS]


def reusable(prompt: Prompt) -> int:
    return (len(prompt.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass(frozen=True)
class Warmer:
    """A site whose store ``kvtier warmup`` fills, with RAM for an eighth of the KV."""

    site: Site

    def prepare(self) -> None:
        reference = self.site.reference
        blocks = reference.footprint_blocks
        self.site.scenario((), ram_blocks=blocks // 8, nvme_blocks=2 * blocks)
        draw = random.Random(2)
        prompts = prompts_of(reference)
        lines = [{"prompt_token_ids": list(each.tokens)} for each in prompts]
        draw.shuffle(lines)
        self.file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    @property
    def file(self) -> Path:
        return self.site.directory / "prompts.jsonl"

    def command(self, *options: str) -> list[str]:
        settings = [f"{name}={value}" for name, value in SETTINGS.items()]
        return [
            *("env", *settings, sys.executable, "-m", "kvtier", "warmup"),
            *(str(self.site.directory / "kvtier.yaml"), "--prompts", str(self.file)),
            *("--model", str(self.site.reference.model), "--json", *options),
            *("--", *ARGUMENTS),
        ]

    def start(self, name: str, *options: str) -> Program:
        with (self.site.directory / f"{name}.log").open("wb") as log:
            return Program(self.command(*options), log)

    def run(self, name: str, *options: str) -> dict[str, Any]:
        """Warm up to the end and return the report."""
        with self.start(name, *options) as process:
            output = process.read(RUN_S)
        assert process.returncode == 0, self.site.log(name)[-4000:]
        report: dict[str, Any] = json.loads(output)
        return report

    def interrupt(self, name: str, number: signal.Signals, *, chunks: int) -> int:
        """Start a warm-up, and send a signal once ``chunks`` chunks are stored."""
        with self.start(name) as process:
            deadline_s = time.monotonic() + RUN_S
            while self.count() < chunks and process.poll() is None:
                assert time.monotonic() < deadline_s
                time.sleep(LOOK_S)
            if number is signal.SIGINT:  # a terminal sends it to every process
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            process.read(RUN_S)
            return process.wait()

    def keys(self) -> set[bytes]:
        (space,) = find_namespaces(self.site.store)
        with IndexReader(space) as reader:
            return {key for keys in reader.all_keys() for key in keys}

    def count(self) -> int:
        try:
            (space,) = find_namespaces(self.site.store)
            with IndexReader(space) as reader:
                return reader.chunks_from(0)
        except Exception:  # noqa: BLE001 - there is no index yet
            return 0


@dataclass(frozen=True)
class Warmed:
    """A warm-up that nothing interrupted."""

    warmer: Warmer
    report: dict[str, Any]
    keys: set[bytes]


@pytest.fixture(scope="module")
def warmed(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Warmed:
    warmer = Warmer(Site(tmp_path_factory.mktemp("warmed"), reference))
    warmer.prepare()
    report = warmer.run("warm", "--retain", "30d")
    return Warmed(warmer, report, warmer.keys())


def test_a_fresh_engine_loads_what_was_warmed_up_and_every_token_is_equal(
    warmed: Warmed, reference: Reference
) -> None:
    site, prompts = warmed.warmer.site, prompts_of(reference)
    wave = Wave(prompts=tuple(prompts), max_tokens=reference.conversations[0].max_tokens)
    blocks = reference.footprint_blocks
    scenario = site.scenario((wave,), ram_blocks=blocks // 8, nvme_blocks=2 * blocks)
    report = run_engine(scenario, site.directory, "fresh")
    reference.assert_equal(report, waves=(wave,))
    cached = sum(answer.cached_tokens for answer in report.answers())
    assert cached >= 0.95 * sum(map(reusable, prompts))
    assert report.count("kvtier_hit_tokens", tier="nvme") > 0
    assert "chunks are retained" in site.log("fresh")
    site.assert_nothing_held()


def test_a_warm_up_computes_each_shared_prefix_once_and_reports_what_it_stored(
    warmed: Warmed, reference: Reference
) -> None:
    prompts, report = prompts_of(reference), warmed.report
    assert report["is_complete"] is True
    assert report["coverage"]["whole"] == report["prompts"] == PROMPTS
    assert report["coverage"]["hit_tokens"] == sum(map(reusable, prompts))
    assert report["verified"] == [{"tier": "nvme", "chunks": len(warmed.keys), "bad": 0}]
    tails = sum(len(each.tokens) - reusable(each) for each in prompts)
    assert report["computed_tokens"] <= len(warmed.keys) * BLOCK_TOKENS + tails
    assert report["retained_chunks"] == len(warmed.keys)
    assert report["saving"]["load_s"] > 0


def check_resumed(warmed: Warmed, site: Site, number: signal.Signals, *, share: float) -> None:
    """Interrupt a warm-up, let another one go on, and compare with one that was not."""
    warmer = Warmer(site)
    warmer.prepare()
    code = warmer.interrupt("first", number, chunks=int(share * len(warmed.keys)))
    assert code == {signal.SIGKILL: -signal.SIGKILL}.get(number, 128 + number)
    if number is not signal.SIGKILL:
        log = site.log("first")
        assert "run the same command again to go on" in log
        assert "Traceback" not in log
        assert "never retrieved" not in log
    before = warmer.count()
    report = warmer.run("second")
    assert report["is_complete"] is True
    assert warmer.keys() == warmed.keys
    missing = len(warmed.keys) - before
    tails = report["planned"]["prompts"] * 2 * BLOCK_TOKENS
    assert report["computed_tokens"] <= missing * BLOCK_TOKENS + tails
    assert report["planned"]["stored"] + report["planned"]["prompts"] == PROMPTS
    site.assert_nothing_held()


@pytest.mark.slow
def test_a_killed_warm_up_goes_on_where_it_was_and_stores_the_same(
    warmed: Warmed, site: Site
) -> None:
    check_resumed(warmed, site, signal.SIGKILL, share=0.4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_warm_up_that_is_interrupted_anywhere_stores_the_same_in_the_end(
    warmed: Warmed, site: Site, seed: int
) -> None:
    draw = random.Random(seed)
    number = (signal.SIGINT, signal.SIGKILL, signal.SIGTERM)[seed % 3]
    check_resumed(warmed, site, number, share=draw.uniform(0.05, 0.9))


def test_the_script_on_the_page_fills_a_store(warmed: Warmed, site: Site) -> None:
    (script,) = (
        block.text
        for block in blocks_of(DOCS / "howto/warm-up.md")
        if block.remark == "needs vLLM"
    )
    warmer = Warmer(site)
    warmer.prepare()
    model = str(site.reference.model)
    arguments = [str(site.directory / "kvtier.yaml"), model, str(warmer.file), *ARGUMENTS]
    settings = [f"{name}={value}" for name, value in SETTINGS.items()]
    done = subprocess.run(
        ["env", *settings, sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "100.0% of the reusable tokens are stored" in done.stdout
    assert warmer.keys() == warmed.keys


@pytest.mark.slow
def test_a_running_server_is_warmed_up_in_place(warmed: Warmed, site: Site) -> None:
    warmer = Warmer(site)
    warmer.prepare()
    model, file = site.reference.model, site.directory / "kvtier.yaml"
    server = Server(model, file, site.directory / "server.log", gpu_blocks=140, requests=4)
    job = WarmupJob(
        file,
        model=str(model),
        prompts=warmer.file,
        options=WarmupOptions(servers=(server.url,)),
    )

    async def warm() -> WarmupReport:
        async with aiohttp.ClientSession(server.url) as session:
            await first_scrape(session)
        *_, last = [event async for event in job]
        assert isinstance(last, Finished)
        return last.report

    with serving(server):
        report = asyncio.run(warm())
        assert report.is_complete, server.tail()
        assert report.coverage is not None
        assert report.coverage.share == 1
        assert server.stop() == 0, server.tail()
    assert warmer.keys() == warmed.keys
    site.assert_nothing_held()


# -- what vLLM does itself --------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
@pytest.mark.parametrize(
    "scope", [Scope(), Scope(cache_salt="s"), Scope("l", "/l", "s")], ids=str
)
def test_the_keys_are_those_of_vllm(
    algorithm: str, scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    function = get_hash_fn_by_name(algorithm)
    before = kv_cache_utils.NONE_HASH if hasattr(kv_cache_utils, "NONE_HASH") else None
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", before, raising=False)
    kv_cache_utils.init_none_hash(function)
    tokens = [random.Random(4).randrange(500) for _ in range(7 * BLOCK_TOKENS + 5)]
    request = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=LoRARequest(scope.lora, 1, scope.lora_path) if scope.lora else None,
        cache_salt=scope.cache_salt or None,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK_TOKENS, function),
    )
    hasher = BlockHasher(BLOCK_TOKENS, algorithm=algorithm, seed="0")
    assert hasher.hashes(tokens, scope) == list(request.block_hashes)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and a chat template."""
    model = tmp_path_factory.mktemp("speaking")
    write_model(model)
    vocabulary = {word: at for at, word in enumerate(["<unk>", *"abcdefgh", "user", "bot"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
        "{% if tools %}h {% endif %}{% if add_generation_prompt %}bot{% endif %}"
    )
    (model / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "unk_token": "<unk>",
                "chat_template": template,
            }
        )
    )
    return model


@pytest.fixture
def setup(speaking: Path) -> Iterator[OfflineSetup]:
    setup = OfflineSetup(str(speaking), ["--dtype", "float32", "--max-model-len", "64"])
    yield setup
    setup.close()


def test_texts_and_conversations_are_rendered_as_vllm_does(setup: OfflineSetup) -> None:
    assert setup.tokens_of_text("a b h") == [1, 2, 8]
    messages = [{"role": "user", "content": "a b"}]
    assert setup.tokens_of_chat(messages, None, None) == [9, 1, 2, 10]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert setup.tokens_of_chat(messages, tools, None) == [9, 1, 2, 8, 10]
    assert setup.tokens_of_chat(messages, None, {"add_generation_prompt": False}) == [9, 1, 2]
    assert setup.most_tokens == 63


def test_wrong_arguments_are_one_line(speaking: Path) -> None:
    wrong: Sequence[tuple[list[str], str]] = [
        (["--no-such-argument"], "write the arguments of vllm serve after --"),
        (["--kv-transfer-config", "{}"], "kvtier warmup sets it; leave it out"),
        (["--data-parallel-size", "2"], "copy the cache to the other ranks"),
        (["--max-model-len", "100000"], "vLLM: "),
    ]
    for arguments, remedy in wrong:
        with pytest.raises(ConfigError) as refusal:
            OfflineSetup(str(speaking), [*arguments, "--dtype", "float32"])
        assert remedy in str(refusal.value)
        assert "\n" not in str(refusal.value)
    with pytest.raises(ConfigError, match="vLLM: "):
        OfflineSetup(os.devnull, ["--dtype", "float32"])
