"""A warm-up by running servers: every engine of each server computes every prompt."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from prometheus_client.parser import text_string_to_metric_families

from kvtier.coverage import KeyRules, Prompt, PromptLine, Stores, check_prompt
from kvtier.errors import ConfigError, KvtierError
from kvtier.manager import GroupReach
from kvtier.printable import printable
from kvtier.warmup._stores import readable

__all__ = ["HttpClient", "OpenClient", "ServerSite", "open_aiohttp"]

_TIMEOUT_S: Final = 3600.0
"""Longest wait for one answer. It is long because a server may compute other prompts first."""
_AT_ONCE: Final = 4
"""Number of concurrent requests of the warm-up to one engine."""
_LOOK_S: Final = 1.0
"""Seconds between two reads of the figures, which a server updates once a second."""
_FIRST_REPORT_S: Final = 30.0
_RANK: Final = "X-data-parallel-rank"
_ENGINE: Final = "vllm:num_requests_running"
"""A metric that every engine reports as soon as it starts."""
Json = Mapping[str, Any]
_UNKNOWN: Final = KeyRules(((0, GroupReach(16)),), 16)
"""Key rules for caches on other machines. These caches count as empty."""


class HttpClient(Protocol):
    """Sends HTTP requests."""

    async def fetch(self, url: str, body: Json | None = None, rank: str = "") -> str:
        """Send a GET, or a POST of ``body`` as JSON, to ``url``; return the answer.

        Args:
            url: The address.
            body: The JSON object to send; None for a GET.
            rank: The data-parallel rank that must answer; empty for any.

        Raises:
            ConfigError: The server refuses the request.
            KvtierError: The server does not answer.
        """


OpenClient = Callable[[], AbstractAsyncContextManager[HttpClient]]
"""Opens an HTTP client."""


class _Aiohttp:
    """An :class:`HttpClient` that uses aiohttp, which vLLM installs."""

    def __init__(self, session: Any, aiohttp: Any) -> None:  # noqa: ANN401 - aiohttp's
        self._session = session
        self._errors = (aiohttp.ClientError, TimeoutError)

    async def fetch(self, url: str, body: Json | None = None, rank: str = "") -> str:
        method, headers = "GET" if body is None else "POST", {_RANK: rank} if rank else {}
        try:
            asking = self._session.request(method, url, json=body, headers=headers)
            async with asking as answer:
                text: str = await answer.text()
        except self._errors as error:
            why = str(error) or type(error).__name__
            raise KvtierError(f"{url}: {why}; check that the server runs") from error
        if answer.status >= 400:
            remedy = "see the server's log"
            raise ConfigError(f"{url}: {answer.status} {printable(text)}; {remedy}")
        return text


@contextlib.asynccontextmanager
async def open_aiohttp() -> AsyncIterator[HttpClient]:
    """Open a client.

    Raises:
        ConfigError: aiohttp is not installed.
    """
    try:
        aiohttp = importlib.import_module("aiohttp")
    except ImportError as error:
        remedy = "install it with: pip install aiohttp"
        raise ConfigError(f"--server needs the package aiohttp; {remedy}") from error
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield _Aiohttp(session, aiohttp)


@dataclass(slots=True)
class _Figures:
    """The figures of one engine in a server's ``/metrics``.

    Attributes:
        ram: Name of the RAM tier; empty until the engine's first report.
        stores: Directories of the engine's namespaces, by tier. Other tiers are absent.
        dirty: Number of chunks that a slower tier must still receive, by tier.
        capacity: Number of slots, by tier.
    """

    ram: str = ""
    stores: dict[str, Path] = field(default_factory=dict)
    dirty: dict[str, float] = field(default_factory=dict)
    capacity: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        tier = labels.get("tier", "")
        if name == "kvtier_info":
            if labels.get("kind") == "ram":
                self.ram = tier
            elif labels["path"]:
                self.stores[tier] = Path(labels["path"], labels["namespace"])
        elif name == "kvtier_dirty_chunks":
            self.dirty[tier] = value
        elif name == "kvtier_capacity_chunks":
            self.capacity[tier] = value

    @property
    def ram_chunks(self) -> int:
        """Number of slots of the RAM tier; 0 until the engine's first report."""
        return int(self.capacity.get(self.ram, 0))

    @property
    def unwritten_chunks(self) -> int:
        """Number of chunks that a slower tier must still receive."""
        return int(sum(self.dirty.values()))

    @property
    def store_chunks(self) -> float:
        """Number of slots of the largest tier in ``stores``; infinite if that is empty."""
        return max((self.capacity.get(tier, 0) for tier in self.stores), default=math.inf)


@dataclass(frozen=True, slots=True, eq=False)
class _Server:
    """One running vLLM server.

    Attributes:
        client: Sends requests.
        url: The server's address, without a path.
        model: The name of the model in requests.
        most_tokens: Number of tokens of the longest prompt that the server accepts.
        lora_paths: Path of each LoRA adapter, by name.
    """

    client: HttpClient
    url: str
    model: str
    most_tokens: int
    lora_paths: Mapping[str, str]

    @classmethod
    async def open(cls, client: HttpClient, url: str, model: str) -> _Server:
        url = url.rstrip("/").removesuffix("/v1")
        cards = json.loads(await client.fetch(f"{url}/v1/models"))["data"]
        bases = [card for card in cards if not card.get("parent")]
        fitting = [card for card in bases if model in {card["id"], card.get("root")}]
        if not fitting:
            names = ", ".join(printable(str(card["id"])) for card in bases)
            raise ConfigError(f"{url}: serves {names}; write that as --model")
        longest = int(fitting[0].get("max_model_len") or 0)
        loras = {str(card["id"]): str(card["root"]) for card in cards if card.get("parent")}
        return cls(client, url, str(fitting[0]["id"]), longest - 1, loras)

    async def tokens(self, line: PromptLine) -> Sequence[int]:
        if line.prompt_token_ids is not None:
            return line.prompt_token_ids
        body: dict[str, Any] = {"model": line.lora or self.model}
        if line.messages is None:
            body["prompt"] = line.prompt
        else:
            body["messages"] = line.messages
            body["add_generation_prompt"] = True
            extra = {"tools": line.tools, "chat_template_kwargs": line.chat_template_kwargs}
            body |= {name: value for name, value in extra.items() if value}
        answer = await self.client.fetch(f"{self.url}/tokenize", body)
        tokens: list[int] = json.loads(answer)["tokens"]
        return tokens

    async def compute(self, prompt: Prompt, rank: str) -> int:
        """Compute a prompt in engine ``rank``; return the number of computed tokens."""
        body = {
            "model": prompt.lora or self.model,
            "prompt": list(prompt.tokens),
            "max_tokens": 1,
            "temperature": 0,
        }
        if prompt.cache_salt:
            body["cache_salt"] = prompt.cache_salt
        answer = await self.client.fetch(f"{self.url}/v1/completions", body, rank)
        usage = json.loads(answer)["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return int(usage["prompt_tokens"]) - int(details.get("cached_tokens") or 0)

    async def figures(self) -> dict[str, _Figures]:
        """Return the figures of each engine behind the server, by the engine's number."""
        text = await self.client.fetch(f"{self.url}/metrics")
        found: dict[str, _Figures] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == _ENGINE or sample.name.startswith("kvtier_"):
                    engine = found.setdefault(sample.labels.get("engine", "0"), _Figures())
                    engine.add(sample.name, sample.labels, sample.value)
        return found


class _Engine:
    """Adapts one engine of a server to :class:`kvtier.warmup._filling.Target`."""

    most_requests = _AT_ONCE
    prompt_timeout_s = _TIMEOUT_S

    def __init__(self, server: _Server, rank: str, figures: _Figures) -> None:
        self._server = server
        self._rank = rank
        self._looked_s = self._moved_s = time.monotonic()
        self.ram_chunks = figures.ram_chunks
        self._ended = asyncio.Event()
        self.unwritten_chunks = figures.unwritten_chunks
        self._figures = figures

    @property
    def is_idle(self) -> bool:
        # The figures are older than the end of the last prompt.
        return not self.unwritten_chunks and time.monotonic() - self._moved_s > 2 * _LOOK_S

    async def compute(self, prompt: Prompt) -> int:
        try:
            return await self._server.compute(prompt, self._rank)
        finally:
            self._moved_s = time.monotonic()
            self._ended.set()

    async def work(self) -> None:
        """Wait briefly for a prompt to end, and read the figures if the last ones are old."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await self._ended.wait()
        self._ended.clear()
        if time.monotonic() - self._looked_s < _LOOK_S:
            return
        figures = (await self._server.figures()).get(self._rank, _Figures())
        self._looked_s = time.monotonic()
        if figures.unwritten_chunks != self.unwritten_chunks:
            self.unwritten_chunks, self._moved_s = figures.unwritten_chunks, self._looked_s

    def stores(self) -> Stores:
        """Return the engine's namespaces on this machine. This call blocks."""
        found = {tier: readable(path) for tier, path in self._figures.stores.items()}
        spaces = {tier: spaces[0] for tier, spaces in found.items() if spaces}
        space = next(iter(spaces.values()), None)
        return Stores(
            spaces=spaces,
            rules=_UNKNOWN if space is None else KeyRules.of(space),
            capacity_chunks=self._figures.store_chunks,
            slot_nbytes=0 if space is None else space.layout.slot_nbytes,
            lora_paths=self._server.lora_paths,
            name_chunk=None,  # only the server knows the content of adapters
        )


class ServerSite:
    """The engines of running servers.

    Args:
        servers: The servers.
        engines: The engines behind the servers. An engine may not have run a step yet.
    """

    def __init__(self, servers: Sequence[_Server], engines: Sequence[_Engine]) -> None:
        self._servers = servers
        self._engines = engines
        self._first: Prompt | None = None

    @classmethod
    async def open(cls, client: HttpClient, urls: Sequence[str], model: str) -> ServerSite:
        """Query the servers for their models and engines, and return a site with them.

        Raises:
            ConfigError: A server serves another model.
            KvtierError: A server does not answer.
        """
        servers = [await _Server.open(client, url, model) for url in urls]
        engines = [
            _Engine(server, rank, figures)
            for server in servers
            for rank, figures in sorted((await server.figures()).items())
        ]
        return cls(servers, engines)

    async def to_prompt(self, number: int, line: PromptLine) -> Prompt:
        """Convert a line to a prompt of token ids.

        Raises:
            ConfigError: The first server refuses the prompt.
        """
        first = self._servers[0]
        prompt = line.with_tokens(number, await first.tokens(line))
        check_prompt(prompt, most_tokens=first.most_tokens, lora_paths=first.lora_paths)
        self._first = self._first or prompt
        return prompt

    def stores(self) -> list[Stores]:
        """Return the known namespaces of each engine. This call blocks."""
        return [engine.stores() for engine in self._engines]

    @contextlib.asynccontextmanager
    async def targets(self) -> AsyncIterator[Sequence[_Engine]]:
        """Yield the engines after all engines have reported their tiers.

        An engine reports its tiers only after its first step. So this method first sends a
        prompt to each engine without a report.

        Raises:
            ConfigError: An engine runs without kvtier.
        """
        assert self._first is not None, "a file has a prompt"
        first = self._first
        self._engines = [
            engine for each in self._servers for engine in await _reported(each, first)
        ]
        yield self._engines


async def _reported(server: _Server, first: Prompt) -> list[_Engine]:
    figures = await server.figures()
    for rank, each in figures.items():
        if not each.ram_chunks:
            await server.compute(first, rank)
    deadline_s = time.monotonic() + _FIRST_REPORT_S
    while not figures or not all(each.ram_chunks for each in figures.values()):
        figures = await server.figures()
        if time.monotonic() > deadline_s:
            remedy = "start it with what kvtier vllm-args prints"
            raise ConfigError(f"{server.url}: an engine reports no kvtier; {remedy}")
        await asyncio.sleep(_LOOK_S)
    return [_Engine(server, rank, each) for rank, each in sorted(figures.items())]
