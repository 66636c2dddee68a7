"""What kvtier learns of an engine from what a vLLM of each version gives it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import UnsupportedError
from kvtier.vllm.content import kv_content
from kvtier.vllm.engine import EngineFacts, data_parallel_rank
from tests.unit.vllm_modules import model_settings, vllm_with

FACTS = EngineFacts(
    engine_id="e1",
    extra_config={},
    records_events=True,
    model_name="some/model",
    kv_dtype="bfloat16",
    kv_layout="LBHNC",
    canonical_layout=False,
    groups=((32, ("layer.0", "layer.1")),),
    group_ids=(0,),
    counting_group=0,
    tokens_per_hash=16,
    blocks_per_chunk=4,
    worker_kv_bytes_per_block=4096,
    rank=1,
    world_size=2,
    tp_size=2,
    pp_size=1,
    pcp_size=1,
    dcp_size=1,
    data_parallel_rank=None,
)


def layer_of(backend: str = "FLASH_ATTN", **types: Any) -> SimpleNamespace:
    """Return a layer of vLLM's, with the element types it says it has."""
    attention = SimpleNamespace(get_name=lambda: backend)
    return SimpleNamespace(get_attn_backend=lambda: attention, **types)


FP8 = layer_of(kv_cache_dtype="fp8")
SKIPPED = layer_of(kv_cache_dtype="auto")
CONVOLUTION = layer_of("SHORT_CONV", get_state_dtype=lambda: ("f16",))


class Worker:
    """A vLLM whose worker registers the KV memory of some layers.

    Attributes:
        config: vLLM's configuration.
    """

    def __init__(
        self,
        *layers: SimpleNamespace,
        dtype: str = "f",
        model: dict[str, Any] | None = None,
        convolutions: str = "SD",
        has_fnuz: bool = False,
        enable_prefix_caching: bool = True,
    ) -> None:
        named = {f"layer.{number}": layer for number, layer in enumerate(layers or (FP8, FP8))}
        self.config = model_settings(
            {"dtype": dtype, **(model or {})},
            compilation_config=SimpleNamespace(static_forward_context=named),
            cache_config=SimpleNamespace(enable_prefix_caching=enable_prefix_caching),
        )
        self._load = vllm_with(
            vllm__model_executor__layers__mamba__mamba_utils=SimpleNamespace(
                get_conv_state_layout=lambda: convolutions
            ),
            vllm__platforms=SimpleNamespace(
                current_platform=SimpleNamespace(is_fp8_fnuz=lambda: has_fnuz)
            ),
        )

    def content(self, engine: EngineFacts = FACTS) -> str:
        """Return what the worker's KV is."""
        return kv_content(self.config, engine, load=self._load)


@pytest.mark.parametrize(
    ("engine_id", "ranks", "rank"),
    [
        ("e1", {"data_parallel_index": 0, "data_parallel_size": 1}, None),
        # A mixture of experts, whose ranks know of each other.
        ("e1_dp0", {"data_parallel_index": 0, "data_parallel_size": 2}, 0),
        ("e1", {"data_parallel_index": 0, "data_parallel_size": 2}, 0),
        ("e1", {"data_parallel_index": 1, "data_parallel_size": 2}, 1),
        # A dense model: each of its ranks gets the configuration of a single engine.
        ("e1_dp0", {"data_parallel_index": 0, "data_parallel_size": 1}, 0),
        ("e1_dp11", {"data_parallel_index": 11, "data_parallel_size": 1}, 11),
        # Names that are numbered by host, or were given.
        ("e1_dp0", {"data_parallel_index": 4, "data_parallel_size": 1}, 4),
        ("my_dp3", {"data_parallel_index": 0, "data_parallel_size": 1}, None),
    ],
)
def test_an_engine_knows_its_number_among_data_parallel_ones(
    engine_id: str, ranks: dict[str, int], rank: int | None
) -> None:
    assert data_parallel_rank(SimpleNamespace(**ranks), engine_id) == rank


@pytest.mark.parametrize("kind", [{"non_causal": True}, {"rswa_window": 128}], ids=str)
def test_a_model_whose_kv_depends_on_more_than_what_came_before_is_refused(
    kind: dict[str, Any],
) -> None:
    odd = layer_of(get_kv_cache_spec=lambda config: SimpleNamespace(**kind))
    plain = layer_of(get_kv_cache_spec=lambda config: SimpleNamespace(non_causal=False))
    shares = layer_of(get_kv_cache_spec=lambda config: None)
    assert Worker(FP8, plain, shares).content()
    with pytest.raises(UnsupportedError, match="no other request can use them"):
        Worker(FP8, plain, odd).content()


def test_media_that_vllm_counts_and_does_not_hash_are_refused() -> None:
    def asked(cached_gb: float, *, caching: bool, **more: Any) -> str:
        settings = {"mm_processor_cache_gb": cached_gb, "language_model_only": False} | more
        media = SimpleNamespace(**settings)
        vllm = Worker(model={"multimodal_config": media}, enable_prefix_caching=caching)
        return vllm.content()

    with pytest.raises(UnsupportedError, match="KV of other"):
        asked(0, caching=False)
    assert asked(0, caching=True)
    assert asked(4, caching=False)
    assert asked(0, caching=False, language_model_only=True)
    assert Worker(enable_prefix_caching=False).content()


def test_a_pooling_model_that_needs_all_tokens_at_once_is_refused() -> None:
    def asked(runner: str, *, supported: bool) -> str:
        model = {"runner_type": runner, "is_prefix_caching_supported": supported}
        return Worker(model=model).content()

    with pytest.raises(UnsupportedError, match="needs all tokens"):
        asked("pooling", supported=False)
    assert asked("pooling", supported=True)
    assert asked("generate", supported=False), "a model with states only, for example"


def test_a_model_that_writes_by_diffusion_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="diffusion models"):
        Worker(model={"is_diffusion": True}).content()
    assert Worker(model={"is_diffusion": False}).content()


def test_every_layer_is_part_of_what_stored_bytes_are() -> None:
    workers = [
        Worker(),
        Worker(SKIPPED, FP8),
        Worker(FP8, SKIPPED),
        Worker(FP8, layer_of("FLASHINFER", kv_cache_dtype="fp8")),
        Worker(FP8, layer_of("FLASHINFER", kv_cache_dtype="fp8"), has_fnuz=True),
        Worker(FP8, layer_of("INDEXER", dtype="torch.uint8")),
        Worker(FP8, layer_of("INDEXER", dtype="torch.int8")),
        Worker(FP8, layer_of("MAMBA", get_state_dtype=lambda: ("f16", "f32"))),
        Worker(FP8, layer_of("MAMBA", get_state_dtype=lambda: ("f32", "f16"))),
        Worker(FP8, CONVOLUTION),
        Worker(FP8, CONVOLUTION, convolutions="DS"),
        Worker(FP8, layer_of("FLASHINFER", kv_cache_dtype="nvfp4")),
        Worker(
            FP8,
            layer_of(
                "FLASHINFER", kv_cache_dtype="nvfp4", impl=SimpleNamespace(nvfp4_fa2=True)
            ),
        ),
        Worker(FP8, layer_of("CPU_ATTN", kv_cache_dtype="auto", isa="vec")),
        Worker(FP8, layer_of("CPU_ATTN", kv_cache_dtype="auto", isa="amx")),
        Worker(dtype="torch.float16"),
        Worker(model={"hf_config": {"rope_theta": 1e6}}),
    ]
    contents = [worker.content() for worker in workers]
    assert len(set(contents)) == len(contents)
    assert contents == [worker.content() for worker in workers]
    renamed = dataclasses.replace(FACTS, rank=0, world_size=8, tp_size=8)
    assert workers[0].content(renamed) == contents[0]
    bfloat16 = layer_of("FLASHINFER", kv_cache_dtype="auto")
    assert (
        Worker(bfloat16, bfloat16).content()
        == Worker(bfloat16, bfloat16, has_fnuz=True).content()
    )


def test_states_of_other_lengths_are_other_bytes() -> None:
    """A padded page has room for one token guessed or three, whose states are cut elsewhere."""

    def hybrid_with(*shapes: tuple[int, ...]) -> str:
        kind = ("f16", "f32")
        layer = layer_of("GDN", get_state_dtype=lambda: kind, get_state_shape=lambda: shapes)
        return Worker(FP8, layer).content()

    contents = [
        hybrid_with((3, 64), (4, 16, 16)),
        hybrid_with((4, 64), (4, 16, 16)),
        hybrid_with((6, 64), (4, 16, 16)),
        hybrid_with((64, 3), (4, 16, 16)),
    ]
    assert len(set(contents)) == len(contents)
    assert hybrid_with((3, 64), (4, 16, 16)) == contents[0]


def paged(rows: int, *, heads: int = 2, tokens: int = 128, **more: Any) -> SimpleNamespace:
    """Return a layer whose kernel has blocks of ``rows`` tokens, and vLLM of ``tokens``."""
    kind = SimpleNamespace(num_states=tokens, head_size=64, **more)
    cache = SimpleNamespace(ndim=4, shape=(7 * tokens // rows, heads, rows, 128))
    return layer_of(
        "FLASHINFER",
        kv_cache_dtype="auto",
        kv_cache=cache,
        get_kv_cache_spec=lambda config: kind,
    )


def test_blocks_that_a_kernel_takes_in_parts_are_ordered_by_these() -> None:
    contents = [Worker(FP8, layer).content() for layer in (paged(128), paged(64), paged(32))]
    assert len(set(contents)) == len(contents)
    whole, parts = contents[0], contents[1]
    unsplit = layer_of("FLASHINFER", kv_cache_dtype="auto")
    assert Worker(FP8, unsplit).content() == whole, "no store is lost"
    other_ranks = Worker(FP8, paged(64, heads=1))
    assert other_ranks.content() == parts


def test_the_length_of_an_indexers_entries_is_part_of_it() -> None:
    def indexer(elements: int) -> str:
        kind = SimpleNamespace(num_states=64, head_size=elements)
        layer = layer_of("INDEXER", dtype="torch.uint8", get_kv_cache_spec=lambda config: kind)
        return Worker(FP8, layer).content()

    fp8, mxfp4 = indexer(132), indexer(68)
    assert fp8 != mxfp4


def test_how_convolutions_are_laid_out_is_no_matter_without_any() -> None:
    contents = [Worker(convolutions=at).content() for at in ("SD", "DS")]
    assert contents[0] == contents[1]


def test_a_worker_without_kv_facts_is_refused() -> None:
    unknown = dataclasses.replace(FACTS, groups=((32, ("layer.7",)),))
    bare = Worker()
    del bare.config.model_config.hf_config
    for engine, worker in [(unknown, Worker()), (FACTS, bare)]:
        with pytest.raises(UnsupportedError, match=r"describes its KV cache.*<0\.34"):
            worker.content(engine)
