"""vLLM's own scheduler, set up without a model, with a connector of a test's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.demo.model import architecture

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

MAX_TOKENS = 512
BLOCK_NBYTES = 4096


@dataclass(frozen=True)
class Setup:
    """How one engine is set up.

    Attributes:
        groups: Tokens per block and window of each KV cache group.
        blocks_per_chunk: Blocks of one chunk.
        store_decode: Whether answers are stored.
        retention_tokens: How densely the tails of windows are kept; vLLM's default is 0.
        asynchronous: Whether steps are scheduled before the last one's tokens are known.
        engine_blocks: Blocks of the engine.
        slots: Chunks of each tier.
        failing: Share of copies that fail, of workers and between tiers.
        long_prefill_tokens: Most tokens of a prompt in a step with others; 0 for no limit.
        load_failures: What becomes of a request whose load failed, as vLLM calls it.
        states: The numbers of the groups that keep states, not KV.
        local: The numbers of the groups with chunked local attention, whose window is a chunk.
        hash_tokens: Tokens that a hash covers; 0 for the shortest block's.
        guesses: Tokens that are guessed in each step that generates.
        events: Whether somebody listens to residency events.
        priorities: Whether requests have some, so that one may lose its blocks in the step
            that gave it some.
    """

    groups: tuple[tuple[int, int | None], ...] = ((16, None),)
    blocks_per_chunk: int = 1
    store_decode: bool = False
    retention_tokens: int | None = None
    asynchronous: bool = False
    engine_blocks: int = 64
    slots: tuple[int, ...] = (48, 256)
    failing: float = 0.0
    long_prefill_tokens: int = 0
    load_failures: str = "recompute"
    states: tuple[int, ...] = ()
    local: tuple[int, ...] = ()
    hash_tokens: int = 0
    guesses: int = 0
    priorities: bool = False
    events: bool = False

    @property
    def alignment_tokens(self) -> int:
        """Tokens at whose multiples hits end."""
        return math.lcm(*(tokens for tokens, _ in self.groups)) * self.blocks_per_chunk

    @property
    def tokens_per_hash(self) -> int:
        return self.hash_tokens or min(tokens for tokens, _ in self.groups)

    def spec_of(self, number: int) -> KVCacheSpec:
        """Return what the layers of a group keep."""
        tokens, window = self.groups[number]
        if number in self.states:
            return MambaSpec(
                block_size=tokens,
                shapes=((2 * tokens,),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
                num_speculative_blocks=self.guesses,
            )
        common: dict[str, Any] = {
            "block_size": tokens,
            "num_kv_heads": 1,
            "head_size": 1,
            "dtype": torch.float32,
        }
        if window is None:
            return FullAttentionSpec(**common)
        if number in self.local:
            return ChunkedLocalAttentionSpec(**common, attention_chunk_size=window)
        return SlidingWindowSpec(**common, sliding_window=window)

    def first_token_read(self, number: int, start: int) -> int:
        """Return the first token that a group's layers read to compute token ``start``."""
        window = self.groups[number][1]
        if window is None:
            return 0
        return start - start % window if number in self.local else max(0, start - window + 1)

    def file(self, store: Path) -> str:
        """Return kvtier's configuration."""
        return (
            "tiers:\n- {kind: ram, capacity: 1GiB}\n"
            f"- {{kind: nvme, path: {store}, capacity: 1GiB}}\n"
            f"engine: {{blocks_per_chunk: {self.blocks_per_chunk}, "
            f"store_decode: {str(self.store_decode).lower()}}}\n"
        )


def make_request(
    number: int,
    prompt: Sequence[int],
    answer: int,
    hasher: Callable[[Request], list[BlockHash]],
    extra: dict[str, Any] | None = None,
    adapter: LoRARequest | None = None,
    *,
    resumable: bool = False,
    priority: int = 0,
) -> Request:
    """Return the request of that ``number``, which generates ``answer`` tokens in any case."""
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=answer, ignore_eos=True, extra_args=extra),
        pooling_params=None,
        block_hasher=hasher,
        lora_request=adapter,
        resumable=resumable,
        priority=priority,
    )


def scheduler_with(
    connector: str, module: str, extra: dict[str, Any], setup: Setup, model: Path
) -> Scheduler:
    """Build vLLM's scheduler over groups of ``setup``, with a connector of ``module``."""
    init_none_hash(sha256)
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(architecture()))
    (model / "kvtier.yaml").write_text(setup.file(model))
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=MAX_TOKENS,
        ),
        cache_config=CacheConfig(
            block_size=setup.groups[0][0],
            enable_prefix_caching=True,
            prefix_cache_retention_interval=setup.retention_tokens,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=128,
            max_model_len=MAX_TOKENS,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=setup.asynchronous,
            disable_hybrid_kv_cache_manager=False,
            long_prefill_token_threshold=setup.long_prefill_tokens,
            watermark=0.0,
            policy="priority" if setup.priorities else "fcfs",
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=module,
            kv_role="kv_both",
            kv_load_failure_policy=setup.load_failures,
            kv_connector_extra_config={
                "kvtier_config": str(model / "kvtier.yaml"),
                "blocks_per_chunk": setup.blocks_per_chunk,
                "spec_name": "PairSpec",
                "spec_module_path": "tests.integration.scheduler_pair",
                "offload_prompt_only": not setup.store_decode,
                **extra,
            },
        ),
    )
    config.scheduler_config.async_scheduling = setup.asynchronous
    if setup.events:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    config.cache_config.num_gpu_blocks = setup.engine_blocks
    config.cache_config.kv_cache_layout = "LBHNC"
    if setup.guesses:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=setup.guesses,
            prompt_lookup_max=2,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    if setup.states:
        config.cache_config.mamba_cache_mode = "align"
    if setup.hash_tokens:
        config.cache_config.prefix_match_unit = setup.hash_tokens
    groups = [
        KVCacheGroupSpec([f"layer{number}"], setup.spec_of(number))
        for number in range(len(setup.groups))
    ]
    layers = [group.layer_names[0] for group in groups]
    memory = KVCacheTensor(setup.engine_blocks * BLOCK_NBYTES, layers, 0, BLOCK_NBYTES)
    kv_cache = KVCacheConfig(
        num_blocks=setup.engine_blocks, kv_cache_tensors=[memory], kv_cache_groups=groups
    )
    build = AsyncScheduler if setup.asynchronous else Scheduler
    return build(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=max(tokens for tokens, _ in setup.groups),
        hash_block_size=setup.tokens_per_hash,
        log_stats=False,
    )


def random_tokens(draw: Random, low: int, high: int) -> list[int]:
    """Return so many tokens, by chance, of a small vocabulary."""
    return [draw.randrange(500) for _ in range(draw.randint(low, high))]
