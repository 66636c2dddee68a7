"""Which vLLM kvtier takes, told from modules of these tests' own making."""

from __future__ import annotations

import abc
import ast
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import UnsupportedError
from kvtier.vllm import compat
from kvtier.vllm.compat import EngineFacts, require_supported_vllm

CONTRACT = Path(compat.__file__).with_name("contract.py")
VERSIONS = "kvtier works with vLLM 0.25 to 0.33"
BASE = "vllm.v1.kv_offload.base"

Load = Callable[[str], Any]


def imported_names() -> dict[str, set[str]]:
    """Return what the contract module imports of vLLM."""
    tree = ast.parse(CONTRACT.read_text())
    return {
        node.module: {alias.name for alias in node.names}
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm")
    }


def vllm_with(**modules: Any) -> Load:
    """Return an importer of a complete vLLM, in which ``modules`` take the place of others.

    Args:
        modules: By name, with underscores for dots; None for one that does not exist.
    """
    found: dict[str, Any] = {
        name: SimpleNamespace(**dict.fromkeys(names, object))
        for name, names in imported_names().items()
    }
    found |= {name.replace("__", "."): module for name, module in modules.items()}

    def load(name: str) -> Any:
        if found.get(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found[name]

    return load


def base_without(*names: str) -> SimpleNamespace:
    return SimpleNamespace(
        **{name: object for name in imported_names()[BASE] if name not in names}
    )


class Asked(abc.ABC):
    """What a vLLM asks of a worker."""

    @abc.abstractmethod
    def submit(self, job_id: int, spec: object) -> bool: ...


class Worker(Asked):
    """What kvtier does."""

    def submit(self, job_id: int, spec: object, expedited: bool = False) -> bool:
        return True


# -- refusals


def test_what_is_checked_is_what_is_imported() -> None:
    with pytest.raises(UnsupportedError) as caught:
        require_supported_vllm(load=vllm_with(**dict.fromkeys(imported_names())))
    for module in imported_names():
        assert f"has no usable {module}" in str(caught.value)
    for module, names in imported_names().items():
        for name in names:
            rest = SimpleNamespace(**dict.fromkeys(names - {name}, object))
            with pytest.raises(UnsupportedError, match=rf"has no {name} in {module}"):
                require_supported_vllm(load=vllm_with(**{module: rest}))


def test_a_complete_vllm_and_a_worker_that_does_all_it_asks_are_taken() -> None:
    require_supported_vllm(Worker, load=vllm_with())


def test_a_missing_name_is_named_with_the_versions_that_work() -> None:
    load = vllm_with(**{BASE: base_without("LookupResult", "OffloadingWorker")})
    with pytest.raises(UnsupportedError) as caught:
        require_supported_vllm(load=load)
    assert str(caught.value) == (
        f"this vLLM has no LookupResult, OffloadingWorker in {BASE}: {VERSIONS}"
    )


def test_an_import_that_failed_is_explained_by_what_is_missing() -> None:
    error = ImportError("cannot import name 'LookupResult'")
    load = vllm_with(**{BASE: base_without("LookupResult")})
    assert str(compat.refusal(error, load=load)) == (
        f"this vLLM has no LookupResult in {BASE}: {VERSIONS}"
    )


def test_an_import_that_failed_for_no_reason_of_ours_says_which() -> None:
    error = ImportError("libtorch.so: undefined symbol")
    refusal = compat.refusal(error, load=vllm_with())
    assert "libtorch.so: undefined symbol" in str(refusal)


@dataclasses.dataclass
class Job:
    """A job of vLLM's."""

    req_id: str
    spec: object


def test_state_that_kvtier_reads_is_looked_for_at_the_start() -> None:
    compat.require_members(Job, "req_id", "spec")
    compat.require_members(SimpleNamespace(manager=None), "manager")


def test_state_that_is_not_there_is_named() -> None:
    with pytest.raises(
        UnsupportedError, match=r"Job has no dst_spec, worker: .*0\.25 to 0\.33"
    ):
        compat.require_members(Job, "req_id", "dst_spec", "worker")
    with pytest.raises(UnsupportedError, match="SimpleNamespace has no manager"):
        compat.require_members(SimpleNamespace(), "manager")


def test_an_abstract_method_kvtier_does_not_have_is_refused() -> None:
    class Newer(Asked):
        @abc.abstractmethod
        def cancel(self, job_id: int) -> None: ...

    class Ours(Newer):
        def submit(self, job_id: int, spec: object) -> bool:
            return True

    with pytest.raises(UnsupportedError, match=r"asks Ours for cancel, which .*0\.25 to 0\.33"):
        require_supported_vllm(Ours, load=vllm_with())


def another(parameters: str) -> type[Asked]:
    """Return a worker of kvtier's under a vLLM whose ``submit`` takes ``parameters``."""
    names: dict[str, Any] = {}
    exec(f"def submit({parameters}): ...", names)
    asked = type("Other", (), {"submit": names["submit"]})
    return type("Ours", (asked,), {"submit": Worker.submit})


@pytest.mark.parametrize(
    "parameters",
    [
        "self, job_id, spec, urgency",
        "self, job_id, spec, expedited=False, urgency=0",
        "self, job_id",
        "self, spec, job_id",
        "self, job_id, destination",
        "self, job_id, spec=None",
        "self, job_id, spec, *, urgency=0",
    ],
)
def test_a_call_that_kvtiers_method_does_not_take_is_refused(parameters: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        require_supported_vllm(another(parameters), load=vllm_with())
    assert str(caught.value) == (
        f"this vLLM calls Ours.submit({parameters}), and kvtier's takes "
        f"(self, job_id, spec, expedited=False): {VERSIONS}"
    )


@pytest.mark.parametrize(
    "parameters", ["self, job_id, spec", "self, job_id, spec, expedited=False"]
)
def test_a_load_is_taken_with_and_without_its_urgency(parameters: str) -> None:
    require_supported_vllm(another(parameters), load=vllm_with())


def test_what_a_newer_vllm_offers_with_a_default_of_its_own_is_taken() -> None:
    class Newer(Asked):
        @property
        def lock(self) -> object:
            return object()

        def on_reset_flushed(self) -> None: ...

        def config_info(self) -> list[dict[str, str]]:
            return [{}]

    class Ours(Newer):
        def submit(self, job_id: int, spec: object) -> bool:
            return True

    require_supported_vllm(Ours, load=vllm_with())


# -- names that changed


def test_the_policy_has_had_two_names() -> None:
    assert compat.chunk_level(SimpleNamespace(BLOCK_LEVEL=1, REQUEST_LEVEL=2)) == 1
    assert compat.chunk_level(SimpleNamespace(CHUNK_LEVEL=3, REQUEST_LEVEL=2)) == 3
    with pytest.raises(UnsupportedError, match="CHUNK_LEVEL"):
        compat.chunk_level(SimpleNamespace(REQUEST_LEVEL=2))


def test_what_is_there_but_not_loadable_is_asked_for_again_where_vllm_has_no_word_for_it() -> (
    None
):
    assert compat.hit_pending(SimpleNamespace(RETRY=1)) == 1
    assert compat.hit_pending(SimpleNamespace(RETRY=1, HIT_PENDING=2)) == 2


def test_media_are_strings_until_vllm_has_an_enumeration() -> None:
    assert compat.media(vllm_with()) == ("CPU", "STORAGE")
    medium = SimpleNamespace(CPU="c", STORAGE="s")
    assert compat.media(vllm_with(**{BASE: SimpleNamespace(Medium=medium)})) == ("c", "s")


def test_a_hits_source_is_nothing_where_nobody_asks() -> None:
    assert compat.hit_sources(vllm_with()) == (None, None)
    module = SimpleNamespace(CacheHitSource=SimpleNamespace(HOST="h", DISK="d"))
    load = vllm_with(vllm__v1__metrics__cache_hit_source=module)
    assert compat.hit_sources(load) == ("h", "d")


@pytest.mark.parametrize(
    ("hashing", "random"),
    [
        ({}, True),  # before 0.29
        ({"DEFAULT_NONE_HASH_SEED": "c", "_NONE_HASH_SEED": None}, False),
        ({"DEFAULT_NONE_HASH_SEED": "c", "_NONE_HASH_SEED": "c"}, False),
        ({"DEFAULT_NONE_HASH_SEED": "c", "_NONE_HASH_SEED": "b7f1"}, True),
    ],
    ids=["no constant seed", "not seeded yet", "constant", "drawn"],
)
def test_hashes_are_stable_with_a_constant_seed_only(
    hashing: dict[str, Any], random: bool
) -> None:
    load = vllm_with(vllm__v1__core__kv_cache_utils=SimpleNamespace(**hashing))
    assert compat.hashes_are_seeded_at_random(load) is random


# -- the engine's configuration

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


def vllm_config() -> SimpleNamespace:
    """Return what vLLM 0.25 gives a spec first."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id="e1"),
        model_config=SimpleNamespace(model="some/model"),
        cache_config=SimpleNamespace(cache_dtype="torch.bfloat16"),
        parallel_config=SimpleNamespace(
            rank=1,
            world_size=2,
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
    )


class Full:
    """Stands for vLLM's ``FullAttentionSpec``."""


INTERFACE = {"vllm__v1__kv_cache_interface": SimpleNamespace(FullAttentionSpec=Full)}


def kv_cache_config(*sizes: int, stride: int = 0, blocks: int = 10) -> SimpleNamespace:
    """Return what vLLM 0.25 gives a spec second."""
    return SimpleNamespace(
        num_blocks=blocks,
        kv_cache_groups=[
            SimpleNamespace(layer_names=["layer.0", "layer.1"], kv_cache_spec=Full())
        ],
        kv_cache_tensors=[SimpleNamespace(size=size, block_stride=stride) for size in sizes],
    )


def old_spec() -> SimpleNamespace:
    """Return what vLLM 0.25's base class makes of a spec."""
    return SimpleNamespace(
        extra_config=EXTRA,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
        gpu_block_size=(32,),
        hash_block_size=16,
        block_size_factor=1,
    )


def worker_of(
    version: str = "0.27.1",
    *,
    layout: str = "HND",
    backend: str = "FLASH_ATTN",
    dtype: str = "f",
) -> Load:
    """Return the importer of a vLLM whose worker registers its KV memory."""
    attention = SimpleNamespace(get_name=lambda: backend)
    layer = SimpleNamespace(get_attn_backend=lambda: attention)
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={"layer.0": layer, "layer.1": layer}
        ),
        model_config=SimpleNamespace(dtype=dtype),
    )
    return vllm_with(
        vllm=SimpleNamespace(__version__=version),
        vllm__config=SimpleNamespace(get_current_vllm_config_or_none=lambda: config),
        vllm__v1__attention__backends__utils=SimpleNamespace(
            get_kv_cache_layout=lambda: layout
        ),
    )


def test_a_vllm_that_says_all_is_read() -> None:
    config = offloading_config(canonical_layout=False, kv_cache_layout="LBHNC")
    assert compat.read_engine(None, [config]) == FACTS
    asked = offloading_config(canonical_layout=True, kv_cache_layout=None)
    facts = compat.read_engine(None, [asked])
    assert facts.canonical_layout
    assert facts.kv_layout == ""


def test_vllms_own_configuration_says_the_same() -> None:
    spec = old_spec()
    arguments = [vllm_config(), kv_cache_config(20_480, 20_480)]
    compat.adopt_chunk_size(spec, arguments)
    facts = compat.read_engine(spec, arguments, load=vllm_with(**INTERFACE))
    assert facts == dataclasses.replace(FACTS, kv_layout=None)
    assert spec.block_size_factor == 4
    assert facts.chunk_tokens == 128


def hybrid(extra: dict[str, Any], *blocks: int, ids: bool = True) -> SimpleNamespace:
    """Return what a spec is told of groups with every other id, of ``blocks`` tokens."""
    config = offloading_config()
    config.extra_config = EXTRA | extra
    config.groups = tuple(
        SimpleNamespace(
            tokens_per_block=tokens,
            layer_names=(f"layer.{at}",),
            **({"group_id": 2 * at + 1} if ids else {}),
        )
        for at, tokens in enumerate(blocks)
    )
    return config


def test_tokens_are_counted_by_the_first_group_that_reads_the_whole_prefix() -> None:
    told = {compat.FULL_GROUPS: [3, 5]}
    facts = compat.read_engine(None, [hybrid(told, 16, 64, 32)])
    assert (facts.group_ids, facts.counting_group, facts.chunk_tokens) == ((1, 3, 5), 3, 256)
    facts = compat.read_engine(None, [hybrid({compat.FULL_GROUPS: []}, 16, 64)])
    assert (facts.counting_group, facts.chunk_tokens) == (1, 64), "windows only"


def test_tokens_are_counted_by_the_first_group_where_a_spec_is_not_told_which_do() -> None:
    facts = compat.read_engine(None, [hybrid({}, 16, 64)])
    assert (facts.counting_group, facts.chunk_tokens) == (1, 64)
    facts = compat.read_engine(None, [hybrid({}, 16, 64, ids=False)])
    assert (facts.group_ids, facts.counting_group) == ((0, 1), 0)


def test_a_group_reads_the_whole_prefix_if_its_layers_do() -> None:
    same = SimpleNamespace(kv_cache_specs={"layer.0": Full()})
    kinds = [object(), Full(), SimpleNamespace(), same]
    groups = [SimpleNamespace(kv_cache_spec=kind) for kind in kinds]
    config = SimpleNamespace(kv_cache_groups=groups)
    assert compat.full_attention_groups(config, load=vllm_with(**INTERFACE)) == [1, 3]


def test_tensors_that_are_windows_into_one_are_counted_once() -> None:
    cases = [
        (kv_cache_config(20_480, 20_480), 4096),
        (kv_cache_config(40_960, 40_960, stride=4096), 4096),
        (kv_cache_config(blocks=0), 0),
    ]
    for config, nbytes in cases:
        arguments = [vllm_config(), config]
        facts = compat.read_engine(old_spec(), arguments, load=vllm_with(**INTERFACE))
        assert facts.worker_kv_bytes_per_block == nbytes


def test_a_layout_that_a_spec_is_not_told_is_what_it_follows_from() -> None:
    facts = compat.read_engine(None, [offloading_config()])
    assert facts.kv_layout is None
    workers = [
        worker_of(),
        worker_of("0.28.0"),
        worker_of(layout="NHD"),
        worker_of(backend="FLASHINFER"),
        worker_of(dtype="torch.float16"),
    ]
    contents = [compat.kv_content(facts, load=load) for load in workers]
    assert contents[0] == "HND FLASH_ATTN f 0.27.1"
    assert len(set(contents)) == len(contents)
    assert compat.kv_content(FACTS, load=worker_of()) == ""


def test_a_worker_that_is_not_told_either_refuses() -> None:
    facts = compat.read_engine(None, [offloading_config()])
    outside = SimpleNamespace(get_current_vllm_config_or_none=lambda: None)
    unknown = dataclasses.replace(facts, groups=((32, ("layer.7",)),))
    for engine, load in [
        (facts, vllm_with(vllm__config=outside)),
        (unknown, worker_of()),
    ]:
        with pytest.raises(UnsupportedError, match=r"how its KV cache is laid out.*0\.33"):
            compat.kv_content(engine, load=load)


def test_a_spec_that_knows_its_chunk_size_is_left_alone() -> None:
    spec = SimpleNamespace(extra_config=EXTRA)
    compat.adopt_chunk_size(spec, [offloading_config()])
    assert vars(spec) == {"extra_config": EXTRA}


def test_a_configuration_without_something_kvtier_needs_is_refused() -> None:
    config = offloading_config(kv_cache_layout="LBHNC")
    del config.cache.tokens_per_hash
    with pytest.raises(UnsupportedError, match=r"tokens_per_hash.*0\.25 to 0\.33"):
        compat.read_engine(None, [config])


def test_a_spec_built_from_something_else_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"builds an offloading spec from \(int, int, str\)"
    ):
        compat.read_engine(None, [1, 2, "x"])
