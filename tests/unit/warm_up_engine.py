"""An engine without a model, which stores what ``kvtier warmup`` sends it in a real store."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.config import NvmeTierConfig, load_config
from kvtier.connector.figures import StoreInfo
from kvtier.connector.groups import describe_groups
from kvtier.coverage import BlockHasher, Scope
from kvtier.errors import ConfigError
from kvtier.keys import ChunkKey, make_key
from kvtier.manager import GroupReach
from kvtier.os.iopool import IoPool
from kvtier.testing.tier_harness import make_sources
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.types import LayoutFingerprint, Outcome, Purpose
from kvtier.vllm.identity import declared_identity

BLOCK = 4
SLOT = 8192
MOST_TOKENS = 64
MODEL = "some/model"


@dataclass
class World:
    """What engines of one test have in common.

    Attributes:
        layout: Settings of the engine that are part of a store's identity.
        known: Those that are known before its start.
        opened: How often vLLM would have been imported.
        computed: Of each prompt that was computed its line, and how many tokens were.
        started: Engines that were started.
        running: Engines that run.
        on_start: Called when an engine starts.
        on_step: Called before each step with the number of prompts that ended.
        on_abort: Called when an engine drops its prompts.
        unwritten: Chunks that a slower tier must still receive.
        refused: Lines that the engine refuses.
        transfers: vLLM's ``--kv-transfer-config`` of each engine.
    """

    layout: dict[str, str | int] = field(default_factory=lambda: {"kv_dtype": "bfloat16"})
    known: dict[str, str | int] = field(default_factory=dict)
    opened: int = 0
    computed: dict[int, int] = field(default_factory=dict)
    started: int = 0
    running: int = 0
    on_start: Callable[[], None] = lambda: None
    on_step: Callable[[int], None] = lambda _: None
    on_abort: Callable[[], None] = lambda: None
    unwritten: int = 0
    refused: set[int] = field(default_factory=set)
    transfers: list[Mapping[str, Any]] = field(default_factory=list)

    def open(
        self, model: str, arguments: Sequence[str], transfer: Mapping[str, Any] | None
    ) -> Setup:
        self.opened += 1
        return Setup(self, model, arguments, transfer)


class Setup:
    """The engine before it starts; a text's tokens are its bytes."""

    algorithm = "sha256"
    block_tokens = BLOCK
    most_tokens = MOST_TOKENS
    vocabulary = 256

    def __init__(
        self,
        world: World,
        model: str,
        arguments: Sequence[str],
        transfer: Mapping[str, Any] | None,
    ) -> None:
        self._world = world
        self._model = model
        self._transfer = transfer
        self.identity = world.known
        self.lora_paths = dict(each.split("=", 1) for each in arguments)
        if transfer is not None:
            world.transfers.append(transfer)

    def tokens_of_text(self, text: str) -> list[int]:
        if text == "unspeakable":
            raise ConfigError("vLLM: no token for this")
        return list(text.encode())

    def tokens_of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_arguments: Mapping[str, Any] | None,
    ) -> list[int]:
        said = [str(each["content"]) for each in messages]
        return self.tokens_of_text("|".join(said))

    def name_chunk(self, lora: str) -> Callable[[ChunkKey], ChunkKey]:
        return lambda key: key[:8] + lora.ljust(15, ".").encode() + key[8:]

    def start(self) -> Engine:
        assert self._transfer is not None
        self._world.on_start()
        extra = self._transfer["kv_connector_extra_config"]
        return Engine(self._world, self._model, Path(extra["kvtier_config"]), self)

    def close(self) -> None:
        pass


class Engine:
    """Computes one prompt in a step; its chunks are stored at the end of the step."""

    ram_chunks = 8
    max_requests = 4

    def __init__(self, world: World, model: str, file: Path, setup: Setup) -> None:
        self._world = world
        self._setup = setup
        config = load_config(file)
        (options,) = config.tiers[1:]
        assert isinstance(options, NvmeTierConfig)
        fields = {**declared_identity(config, model), "tokens_per_hash": BLOCK, **world.layout}
        groups = describe_groups([0], [GroupReach(BLOCK)], tokens_per_hash=BLOCK)
        fingerprint = LayoutFingerprint(fields, model, groups)
        self._pool = IoPool(1, name="kvtier-test")
        try:
            self._tier = SlabTier.open(options, TierContext(SLOT, fingerprint, self._pool))
        except BaseException:
            self._pool.close(timeout_s=10)
            raise
        self.stores = [
            StoreInfo("ram", "ram", "", ""),
            StoreInfo(options.name, options.kind, fingerprint.namespace(), str(options.path)),
        ]
        self._slots = dict(self._tier.recovered())
        self._free = iter(
            [
                slot
                for slot in range(self._tier.capacity_slots)
                if slot not in self._slots.values()
            ]
        )
        self._hasher = BlockHasher(BLOCK)
        self._queue: deque[tuple[int, Sequence[int], Scope]] = deque()
        self._ended = 0
        world.started += 1
        world.running += 1

    def add(self, line: int, tokens: Sequence[int], *, lora: str, cache_salt: str) -> str:
        if line in self._world.refused:
            return "no"
        scope = Scope(lora, self._setup.lora_paths.get(lora, ""), cache_salt)
        self._queue.append((line, tokens, scope))
        return ""

    def step(self) -> list[tuple[int, int, int]]:
        self._world.on_step(self._ended)
        if not self._queue:
            return []
        line, tokens, scope = self._queue.popleft()
        keys = [make_key(each, 0) for each in self._hasher.hashes(tokens, scope)]
        if scope.lora:
            keys = list(map(self._setup.name_chunk(scope.lora), keys))
        new = [key for key in keys if key not in self._slots]
        if new:
            self._store(new)
        self._ended += 1
        self._world.computed[line] = len(new) * BLOCK
        return [(line, len(tokens), (len(keys) - len(new)) * BLOCK)]

    def _store(self, keys: Sequence[ChunkKey]) -> None:
        slots = [next(self._free) for _ in keys]
        write = self._tier.write(keys, slots, make_sources(keys, SLOT), purpose=Purpose.STORE)
        assert set(asyncio.run(write).outcomes) == {Outcome.DONE}
        self._slots.update(zip(keys, slots, strict=True))

    def has_work(self) -> bool:
        return bool(self._queue or self._world.unwritten)

    def unwritten_chunks(self) -> int:
        return self._world.unwritten

    def abort(self) -> None:
        self._world.on_abort()
        self._queue.clear()

    def close(self) -> None:
        asyncio.run(self._tier.aclose())
        assert self._pool.close(timeout_s=10)
        self._world.running -= 1
