"""What kvtier learns of an engine from what a vLLM of each version gives it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import UnsupportedError
from kvtier.vllm.compat.engine import EngineFacts, kv_content, read_offloading_config
from tests.unit.vllm_modules import Load, model_settings, vllm_with

PARALLEL = {
    "rank": 1,
    "world_size": 2,
    "tp_size": 2,
    "pp_size": 1,
    "pcp_size": 1,
    "dcp_size": 1,
}
EXTRA = {"kvtier_config": "/etc/kvtier.yaml", "blocks_per_chunk": 4}
FACTS = EngineFacts(
    engine_id="e1",
    extra_config=EXTRA,
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
    **PARALLEL,
    data_parallel_rank=None,
)


def offloading_config(**later: Any) -> SimpleNamespace:
    """Return what vLLM 0.26 gives a spec, and what came ``later``."""
    return SimpleNamespace(
        groups=(SimpleNamespace(tokens_per_block=32, layer_names=("layer.0", "layer.1")),),
        worker_kv_bytes_per_block=4096,
        enable_kv_cache_events=True,
        extra_config=EXTRA,
        engine_id="e1",
        model=SimpleNamespace(name="some/model", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=4),
        parallel=SimpleNamespace(**PARALLEL),
        **later,
    )


def layer_of(backend: str = "FLASH_ATTN", **types: Any) -> SimpleNamespace:
    """Return a layer of vLLM's, with the element types it says it has."""
    attention = SimpleNamespace(get_name=lambda: backend)
    return SimpleNamespace(get_attn_backend=lambda: attention, **types)


FP8 = layer_of(kv_cache_dtype="fp8")
SKIPPED = layer_of(kv_cache_dtype="auto")
CONVOLUTION = layer_of("SHORT_CONV", get_state_dtype=lambda: ("f16",))


def worker_of(
    *layers: SimpleNamespace,
    version: str = "0.27.1",
    layout: str = "HND",
    dtype: str = "f",
    model: dict[str, Any] | None = None,
    convolutions: str = "SD",
    has_fnuz: bool = False,
    **cache: Any,
) -> Load:
    """Return the importer of a vLLM whose worker registers the KV memory of ``layers``."""
    settings = model_settings({"dtype": dtype, **(model or {})})
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={
                f"layer.{number}": layer for number, layer in enumerate(layers or (FP8, FP8))
            }
        ),
        **vars(settings),
        cache_config=SimpleNamespace(**cache),
    )
    return vllm_with(
        vllm=SimpleNamespace(__version__=version),
        vllm__config=SimpleNamespace(get_current_vllm_config_or_none=lambda: config),
        vllm__v1__attention__backends__utils=SimpleNamespace(
            get_kv_cache_layout=lambda: layout
        ),
        vllm__model_executor__layers__mamba__mamba_utils=SimpleNamespace(
            get_conv_state_layout=lambda: convolutions
        ),
        vllm__platforms=SimpleNamespace(
            current_platform=SimpleNamespace(is_fp8_fnuz=lambda: has_fnuz)
        ),
    )


def config_of(load: Load) -> Any:
    """Return the configuration of a worker's engine."""
    return load("vllm.config").get_current_vllm_config_or_none()


def content_of(engine: EngineFacts, load: Load) -> str:
    """Return what the KV of a worker's engine is."""
    return kv_content(config_of(load), engine, load=load)


def test_a_vllm_that_says_all_is_read() -> None:
    config = offloading_config(canonical_layout=False, kv_cache_layout="LBHNC")
    assert read_offloading_config(config) == FACTS
    asked = offloading_config(canonical_layout=True, kv_cache_layout=None)
    facts = read_offloading_config(asked)
    assert facts.canonical_layout
    assert facts.kv_layout == ""


@pytest.mark.parametrize(
    ("engine_id", "told", "rank"),
    [
        ("e1", {"data_parallel_index": 0, "data_parallel_size": 1}, None),
        # A mixture of experts, whose ranks know of each other.
        ("e1_dp0", {"data_parallel_index": 0, "data_parallel_size": 2}, 0),
        ("e1", {"data_parallel_index": 0, "data_parallel_size": 2}, 0),
        ("e1", {"data_parallel_index": 1, "data_parallel_size": 2}, 1),
        # A dense model, whose ranks are told that they are alone.
        ("e1_dp0", {"data_parallel_index": 0, "data_parallel_size": 1}, 0),
        ("e1_dp11", {"data_parallel_index": 11, "data_parallel_size": 1}, 11),
        # Names that are numbered by host, or were given.
        ("e1_dp0", {"data_parallel_index": 4, "data_parallel_size": 1}, 4),
        ("my_dp3", {"data_parallel_index": 0, "data_parallel_size": 1}, None),
        # A vLLM that tells a spec nothing of it.
        ("e1_dp2", {}, 2),
        ("e1", {}, None),
    ],
)
def test_an_engine_knows_its_number_among_data_parallel_ones(
    engine_id: str, told: dict[str, int], rank: int | None
) -> None:
    config = offloading_config()
    config.engine_id = engine_id
    vars(config.parallel).update(told)
    assert read_offloading_config(config).data_parallel_rank == rank


@pytest.mark.parametrize("kind", [{"non_causal": True}, {"rswa_window": 128}], ids=str)
def test_a_model_whose_kv_depends_on_more_than_what_came_before_is_refused(
    kind: dict[str, Any],
) -> None:
    odd = layer_of(get_kv_cache_spec=lambda config: SimpleNamespace(**kind))
    plain = layer_of(get_kv_cache_spec=lambda config: SimpleNamespace(non_causal=False))
    shares = layer_of(get_kv_cache_spec=lambda config: None)
    assert content_of(FACTS, worker_of(FP8, plain, shares))
    with pytest.raises(UnsupportedError, match="no other request can use them"):
        content_of(FACTS, worker_of(FP8, plain, odd))


def test_media_that_vllm_counts_and_does_not_hash_are_refused() -> None:
    def asked(cached_gb: float, *, caching: bool, **more: Any) -> str:
        media = SimpleNamespace(mm_processor_cache_gb=cached_gb, **more)
        vllm = worker_of(model={"multimodal_config": media}, enable_prefix_caching=caching)
        return content_of(FACTS, vllm)

    with pytest.raises(UnsupportedError, match="KV of another"):
        asked(0, caching=False)
    assert asked(0, caching=True)
    assert asked(4, caching=False)
    assert asked(0, caching=False, language_model_only=True)
    assert content_of(FACTS, worker_of(enable_prefix_caching=False))


def test_a_pooling_model_that_needs_all_tokens_at_once_is_refused() -> None:
    def asked(runner: str, *, supported: bool) -> str:
        model = {"runner_type": runner, "is_prefix_caching_supported": supported}
        return content_of(FACTS, worker_of(model=model))

    with pytest.raises(UnsupportedError, match="needs all tokens"):
        asked("pooling", supported=False)
    assert asked("pooling", supported=True)
    assert asked("generate", supported=False), "a model with states only, for example"


def test_a_model_that_writes_by_diffusion_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="by diffusion"):
        content_of(FACTS, worker_of(model={"is_diffusion": True}))
    assert content_of(FACTS, worker_of(model={"is_diffusion": False}))


def test_every_layer_is_part_of_what_stored_bytes_are() -> None:
    workers = [
        worker_of(),
        worker_of(SKIPPED, FP8),
        worker_of(FP8, SKIPPED),
        worker_of(FP8, layer_of("FLASHINFER", kv_cache_dtype="fp8")),
        worker_of(FP8, layer_of("FLASHINFER", kv_cache_dtype="fp8"), has_fnuz=True),
        worker_of(FP8, layer_of("INDEXER", dtype="torch.uint8")),
        worker_of(FP8, layer_of("INDEXER", dtype="torch.int8")),
        worker_of(FP8, layer_of("MAMBA", get_state_dtype=lambda: ("f16", "f32"))),
        worker_of(FP8, layer_of("MAMBA", get_state_dtype=lambda: ("f32", "f16"))),
        worker_of(FP8, CONVOLUTION),
        worker_of(FP8, CONVOLUTION, convolutions="DS"),
        worker_of(FP8, layer_of("FLASHINFER", kv_cache_dtype="nvfp4")),
        worker_of(
            FP8,
            layer_of(
                "FLASHINFER", kv_cache_dtype="nvfp4", impl=SimpleNamespace(nvfp4_fa2=True)
            ),
        ),
        worker_of(FP8, layer_of("CPU_ATTN", kv_cache_dtype="auto", isa="vec")),
        worker_of(FP8, layer_of("CPU_ATTN", kv_cache_dtype="auto", isa="amx")),
        worker_of(dtype="torch.float16"),
        worker_of(model={"hf_config": {"rope_theta": 1e6}}),
    ]
    contents = [content_of(FACTS, load) for load in workers]
    assert len(set(contents)) == len(contents)
    assert contents == [content_of(FACTS, load) for load in workers]
    renamed = dataclasses.replace(FACTS, rank=0, world_size=8, tp_size=8)
    assert content_of(renamed, workers[0]) == contents[0]
    bfloat16 = layer_of("FLASHINFER", kv_cache_dtype="auto")
    assert content_of(FACTS, worker_of(bfloat16, bfloat16)) == content_of(
        FACTS, worker_of(bfloat16, bfloat16, has_fnuz=True)
    )


def test_states_of_other_lengths_are_other_bytes() -> None:
    """A padded page has room for one token guessed or three, whose states are cut elsewhere."""

    def hybrid_with(*shapes: tuple[int, ...]) -> str:
        kind = ("f16", "f32")
        layer = layer_of("GDN", get_state_dtype=lambda: kind, get_state_shape=lambda: shapes)
        return content_of(FACTS, worker_of(FP8, layer))

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
    contents = [
        content_of(FACTS, worker_of(FP8, layer)) for layer in (paged(128), paged(64), paged(32))
    ]
    assert len(set(contents)) == len(contents)
    whole, parts = contents[0], contents[1]
    unsplit = layer_of("FLASHINFER", kv_cache_dtype="auto")
    assert content_of(FACTS, worker_of(FP8, unsplit)) == whole, "no store is lost"
    other_ranks = worker_of(FP8, paged(64, heads=1))
    assert content_of(FACTS, other_ranks) == parts


def test_how_long_what_an_indexer_keeps_is_is_part_of_it() -> None:
    def indexer(elements: int) -> str:
        kind = SimpleNamespace(num_states=64, head_size=elements)
        layer = layer_of("INDEXER", dtype="torch.uint8", get_kv_cache_spec=lambda config: kind)
        return content_of(FACTS, worker_of(FP8, layer))

    fp8, mxfp4 = indexer(132), indexer(68)
    assert fp8 != mxfp4


def test_how_convolutions_are_laid_out_is_no_matter_without_any() -> None:
    contents = [content_of(FACTS, worker_of(convolutions=at)) for at in ("SD", "DS")]
    assert contents[0] == contents[1]


def test_a_vllm_that_does_not_say_how_convolutions_are_laid_out_has_one_way() -> None:
    load = worker_of(FP8, CONVOLUTION)
    del load("vllm.model_executor.layers.mamba.mamba_utils").get_conv_state_layout
    assert content_of(FACTS, load)


def test_scales_that_are_computed_at_every_start_are_refused() -> None:
    content_of(FACTS, worker_of(calculate_kv_scales=False))
    with pytest.raises(UnsupportedError, match="remove --calculate-kv-scales"):
        content_of(FACTS, worker_of(calculate_kv_scales=True))


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_engine_that_goes_on_after_a_failed_step_is_refused(goes_on: bool) -> None:
    load = worker_of()
    config = config_of(load)
    config.parallel_config = SimpleNamespace(enable_fault_tolerance=goes_on)
    if goes_on:
        with pytest.raises(UnsupportedError, match="with --enable-fault-tolerance"):
            content_of(FACTS, load)
    else:
        content_of(FACTS, load)


@pytest.mark.parametrize(
    ("parallel", "workers", "refusal"),
    [
        ({"nnodes_within_dp": 2}, 2, "run on 2 hosts"),
        ({"nnodes_within_dp": 1}, 2, None),
        ({"distributed_executor_backend": "external_launcher"}, 2, "each of the 2 workers"),
        ({"distributed_executor_backend": "external_launcher"}, 1, None),
        ({"distributed_executor_backend": "mp"}, 2, None),
    ],
)
def test_workers_that_would_wait_for_each_other_in_vain_are_refused_at_once(
    parallel: dict[str, Any], workers: int, refusal: str | None
) -> None:
    load = worker_of()
    config = config_of(load)
    config.parallel_config = SimpleNamespace(**parallel)
    engine = dataclasses.replace(FACTS, world_size=workers)
    if refusal is None:
        assert content_of(engine, load)
    else:
        with pytest.raises(UnsupportedError, match=refusal):
            content_of(engine, load)


@pytest.mark.parametrize(
    ("sleeps", "workers", "in_process", "is_refused"),
    [
        (True, 2, "0", True),
        (True, 1, "0", False),
        (True, 2, "1", False),
        (False, 2, "0", False),
    ],
)
def test_workers_whose_memory_goes_while_they_copy_from_it_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    sleeps: bool,
    workers: int,
    in_process: str,
    is_refused: bool,
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", in_process)
    load = worker_of(model={"enable_sleep_mode": sleeps})
    engine = dataclasses.replace(FACTS, world_size=workers)
    if is_refused:
        with pytest.raises(UnsupportedError, match="unset that variable"):
            content_of(engine, load)
    else:
        assert content_of(engine, load)


def test_a_worker_that_is_not_told_either_refuses() -> None:
    unknown = dataclasses.replace(FACTS, groups=((32, ("layer.7",)),))
    bare = worker_of()
    del config_of(bare).model_config.hf_config
    for engine, load in [(unknown, worker_of()), (FACTS, bare)]:
        with pytest.raises(UnsupportedError, match=r"what its KV cache holds.*0\.33"):
            content_of(engine, load)


def test_scales_that_vllm_resets_after_a_load_are_refused() -> None:
    own = layer_of(kv_cache_dtype="int8_per_token_head")
    with pytest.raises(UnsupportedError, match=r"layer\.1 keeps scales of each token"):
        content_of(FACTS, worker_of(FP8, own))
