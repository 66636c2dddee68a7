"""Client of a running vLLM server: its models, its tokenizer, its metrics."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from prometheus_client.parser import text_string_to_metric_families

from kvtier.errors import ConfigError, KvtierError
from kvtier.printable import printable
from kvtier.warmup._prompts import Prompt, PromptLine

__all__ = ["EngineFigures", "HttpClient", "OpenClient", "Server", "open_aiohttp"]

_TIMEOUT_S: Final = 3600.0
"""Longest wait for one answer: a server may compute other prompts first."""
_RANK: Final = "X-data-parallel-rank"
_ENGINE: Final = "vllm:num_requests_running"
"""A metric that every engine has from its start."""


class HttpClient(Protocol):
    """Sends HTTP requests; raises KvtierError if the server does not answer."""

    async def get(self, url: str) -> str:
        """Return the text at ``url``."""

    async def post(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:  # noqa: ANN401 - JSON
        """Send ``body`` as JSON and return the answer, parsed from JSON.

        Raises:
            ConfigError: The server refuses the request.
        """


class _Aiohttp:
    """An :class:`HttpClient` of aiohttp, which vLLM installs."""

    def __init__(self, session: Any, aiohttp: Any) -> None:  # noqa: ANN401 - aiohttp's
        self._session = session
        self._error = aiohttp.ClientError

    async def get(self, url: str) -> str:
        with self._explained(url):
            async with self._session.get(url) as answer:
                answer.raise_for_status()
                text: str = await answer.text()
        return text

    async def post(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:  # noqa: ANN401 - JSON
        with self._explained(url):
            async with self._session.post(url, json=body, headers=headers) as answer:
                if answer.status >= 400:
                    text = printable((await answer.text())[:300])
                    raise ConfigError(f"{url}: {answer.status} {text}")
                content = await answer.json()
        return content

    @contextlib.contextmanager
    def _explained(self, url: str) -> Iterator[None]:
        try:
            yield
        except (self._error, TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise KvtierError(f"{url}: {why}; check that the server runs") from error


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


OpenClient = Callable[[], AbstractAsyncContextManager[HttpClient]]
"""Makes a client."""


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The figures of one engine in a server's ``/metrics``.

    Attributes:
        unwritten_chunks: Chunks that a slower tier must still receive.
        ram_chunks: Slots of the RAM tier; 0 before its first report.
        tier_chunks: Slots of the largest slower tier.
        stores: Directory of the engine's namespace in each slower tier, by name.
    """

    unwritten_chunks: int
    ram_chunks: int
    tier_chunks: int
    stores: Mapping[str, Path]


@dataclass(frozen=True, slots=True, eq=False)
class Server:
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
    async def open(cls, client: HttpClient, url: str, model: str) -> Server:
        """Query a server's models, and return the server.

        Raises:
            ConfigError: The server serves another model.
            KvtierError: The server does not answer.
        """
        url = url.rstrip("/").removesuffix("/v1")
        cards = (await _json(client, f"{url}/v1/models"))["data"]
        bases = [card for card in cards if not card.get("parent")]
        fitting = [card for card in bases if model in {card["id"], card.get("root")}]
        if not fitting:
            names = ", ".join(printable(str(card["id"])) for card in bases)
            raise ConfigError(f"{url}: serves {names}; write that as --model")
        longest = int(fitting[0].get("max_model_len") or 0)
        loras = {str(card["id"]): str(card["root"]) for card in cards if card.get("parent")}
        return cls(client, url, str(fitting[0]["id"]), longest - 1, loras)

    async def tokens(self, line: PromptLine) -> tuple[int, ...]:
        """Return the token ids of the prompt in a line.

        Raises:
            ConfigError: The server refuses the line.
        """
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
        answer = await self.client.post(f"{self.url}/tokenize", body, {})
        return tuple(answer["tokens"])

    async def compute(self, prompt: Prompt, rank: str) -> int:
        """Compute a prompt in engine ``rank``; return how many tokens were not cached.

        Raises:
            ConfigError: The server refuses the prompt.
        """
        body = {
            "model": prompt.lora or self.model,
            "prompt": list(prompt.tokens),
            "max_tokens": 1,
            "temperature": 0,
        }
        if prompt.cache_salt:
            body["cache_salt"] = prompt.cache_salt
        url = f"{self.url}/v1/completions"
        usage = (await self.client.post(url, body, {_RANK: rank}))["usage"]
        details = usage.get("prompt_tokens_details") or {}
        return int(usage["prompt_tokens"]) - int(details.get("cached_tokens") or 0)

    async def figures(self) -> dict[str, EngineFigures]:
        """Return the figures of each engine behind the server, by the engine's number."""
        text = await self.client.get(f"{self.url}/metrics")
        found: dict[str, _Samples] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == _ENGINE or sample.name.startswith("kvtier_"):
                    engine = found.setdefault(sample.labels.get("engine", "0"), _Samples())
                    engine.add(sample.name, sample.labels, sample.value)
        return {engine: samples.figures() for engine, samples in found.items()}


@dataclass(slots=True)
class _Samples:
    """The samples in ``/metrics`` that belong to one engine."""

    ram: str = ""
    stores: dict[str, Path] = field(default_factory=dict)
    dirty: dict[str, float] = field(default_factory=dict)
    capacity: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, labels: Mapping[str, str], value: float) -> None:
        tier = labels.get("tier", "")
        if name == "kvtier_info":
            if labels["path"]:
                self.stores[tier] = Path(labels["path"], labels["namespace"])
            else:
                self.ram = tier
        elif name == "kvtier_dirty_chunks":
            self.dirty[tier] = value
        elif name == "kvtier_capacity_chunks":
            self.capacity[tier] = value

    def figures(self) -> EngineFigures:
        slower = [value for tier, value in self.capacity.items() if tier != self.ram]
        return EngineFigures(
            unwritten_chunks=int(sum(self.dirty.values())),
            ram_chunks=int(self.capacity.get(self.ram, 0)),
            tier_chunks=int(max(slower, default=0)),
            stores=self.stores,
        )


async def _json(client: HttpClient, url: str) -> Any:  # noqa: ANN401 - JSON
    return json.loads(await client.get(url))
