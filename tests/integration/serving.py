"""A real server in a process of its own, and clients that talk to it over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kvtier.config import load_config, vllm_transfer_config
from tests.demo.model import BLOCK_TOKENS
from tests.demo.runner import SETTINGS
from tests.integration.preloaded import Program

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
LISTEN_TIMEOUT_S = 30.0
RETRY_S = 0.05
UP = "Application startup complete"
TAIL_LINES = 40


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this machine.

    Attributes:
        pid: Its number.
        session: Number of the process that began its session.
        command: Its command line.
    """

    pid: int
    session: int
    command: str

    @classmethod
    def all(cls) -> Iterator[Process]:
        """Yield every process that has not ended; zombies have."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                state, _, _, session = (
                    (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                )
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
            if state != "Z":
                yield cls(int(entry.name), int(session), command)

    def ended_by(self, deadline_s: float) -> bool:
        """Wait for its end, but no longer than until ``deadline_s``."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            left_s = max(deadline_s - time.monotonic(), 0.0)
            return bool(select.select([handle], [], [], left_s)[0])
        finally:
            os.close(handle)


class Server:
    """vLLM's OpenAI-compatible server with kvtier.

    Args:
        model: Directory of the model.
        config: kvtier's YAML file.
        log: Where its output goes.
        gpu_blocks: Blocks of the GPU's cache.
        requests: Most requests that run at once.
        beside: Arguments of other connectors that serve along with kvtier's.
        data_parallel_size: Engines behind it.
        settings: Environment variables of its own.
    """

    def __init__(
        self,
        model: Path,
        config: Path,
        log: Path,
        *,
        gpu_blocks: int,
        requests: int,
        beside: Sequence[Mapping[str, object]] = (),
        data_parallel_size: int = 1,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.log = log
        self.port = free_port()
        self._up = threading.Event()
        self._start_timeout_s = START_TIMEOUT_S * data_parallel_size
        arguments = [
            *("--model", str(model), "--skip-tokenizer-init", "--enforce-eager"),
            *("--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--seed", "0"),
            *("--max-model-len", "2048", "--max-num-seqs", str(requests)),
            *("--num-gpu-blocks-override", str(gpu_blocks)),
            # Without it vLLM kills its engine at once, before a tier can close.
            *("--shutdown-timeout", "30"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--data-parallel-size", str(data_parallel_size)),
            *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
            *("--kv-transfer-config", json.dumps(transfer_config(config, beside))),
        ]
        # vLLM's front end and its engine core are two processes, unlike in the other tests.
        settings = SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **settings}
        self._process = Program(
            [
                *("env", *(f"{name}={value}" for name, value in settings.items())),
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments),
            ],
            None,
        )
        self._process.stdin.close()
        self._reader = threading.Thread(target=self._copy_log, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_until_up(self) -> None:
        self._up.wait(self._start_timeout_s)
        assert UP in self.log.read_text(), self.tail()

    def wait_until_ended(self) -> int:
        """Return the exit status of a server that ends by itself."""
        return self._process.wait(self._start_timeout_s)

    def stop(self) -> int:
        """End it as an operator does and return its exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_TIMEOUT_S)

    def left_behind(self) -> list[str]:
        """Give its processes a while to end and name those that do not."""
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        return [
            process.command for process in self._session() if not process.ended_by(deadline_s)
        ]

    def kill(self) -> None:
        if self._process.poll() is None or self._session():
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    def _session(self) -> list[Process]:
        return [each for each in Process.all() if each.session == self._process.pid]

    def _copy_log(self) -> None:
        with self._process.stdout as output, self.log.open("wb", buffering=0) as log:
            for line in output:
                log.write(line.encode())
                if UP in line:
                    self._up.set()
        self._up.set()


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Wait until ``server`` is up, and see that it ends."""
    try:
        server.wait_until_up()
        yield server
    finally:
        server.kill()


def transfer_config(config: Path, beside: Sequence[Mapping[str, object]]) -> dict[str, object]:
    ours = vllm_transfer_config(config, load_config(config))
    if not beside:
        return ours
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours, *beside]},
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Streamed:
    """One answer as it came over the wire."""

    tokens: tuple[int, ...]
    pieces: int
    """Messages that carried tokens."""
    prompt_tokens: int
    cached_tokens: int


async def complete(
    session: aiohttp.ClientSession,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    rank: int | None = None,
) -> Streamed:
    """Ask for a completion and read its stream to the end; ``rank`` is the engine to answer."""
    headers = None if rank is None else {"X-data-parallel-rank": str(rank)}
    request = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tokens: list[int] = []
    pieces = 0
    usage: dict[str, Any] = {}
    async with session.post("/v1/completions", json=request, headers=headers) as response:
        response.raise_for_status()
        async for event in events(response):
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                new = choice.get("token_ids") or []
                tokens += new
                pieces += bool(new)
    return Streamed(
        tokens=tuple(tokens),
        pieces=pieces,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the messages of a stream of server-sent events up to the closing one."""
    async for line in response.content:
        if line.startswith(b"data: "):
            text = line.removeprefix(b"data: ").strip()
            if text == b"[DONE]":
                return
            yield json.loads(text)
    raise AssertionError("the stream broke off")


class Scrape:
    """What ``/metrics`` said at one moment.

    Attributes:
        declared: Names of all metrics, with samples or without.
        counters: Every sample of a counter, by its name and its labels.
    """

    def __init__(self, text: str) -> None:
        self._samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        self.declared: set[str] = set()
        self.counters: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            self.declared.add(family.name)
            for sample in family.samples:
                series = sample.name, frozenset(sample.labels.items())
                assert series not in self._samples, f"{series} is there twice"
                self._samples[series] = sample.value
                if family.type == "counter" and not sample.name.endswith("_created"):
                    self.counters[series] = sample.value

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the series of ``name`` that have ``labels``; there must be one."""
        found = [
            value
            for (sample, have), value in self._samples.items()
            if sample == name and set(labels.items()) <= have
        ]
        assert found, f"no series {name} {labels}"
        return sum(found)

    def labels(self, name: str) -> set[str]:
        """Return the names of the labels of the series of ``name``; empty if there is none."""
        return {label for sample, have in self._samples if sample == name for label, _ in have}


async def first_scrape(session: aiohttp.ClientSession) -> Scrape:
    """Scrape as soon as the server listens, a moment after it said that it is up."""
    deadline_s = time.monotonic() + LISTEN_TIMEOUT_S
    while True:
        try:
            return await scrape(session)
        except aiohttp.ClientConnectorError:
            assert time.monotonic() < deadline_s, "the server does not listen"
            await asyncio.sleep(RETRY_S)


async def scrape(session: aiohttp.ClientSession) -> Scrape:
    async with session.get("/metrics") as response:
        response.raise_for_status()
        return Scrape(await response.text())
