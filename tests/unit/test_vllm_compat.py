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

DOORS = Path(compat.__file__).parents[1]
CONTRACT = DOORS / "contract.py"
VERSIONS = "kvtier works with vLLM 0.25 to 0.33"
BASE = "vllm.v1.kv_offload.base"

Load = Callable[[str], Any]


def imported_names(contract: Path = CONTRACT) -> dict[str, set[str]]:
    """Return what a contract module imports of vLLM."""
    tree = ast.parse(contract.read_text())
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


def test_what_the_connector_imports_beside_is_named_when_it_is_missing() -> None:
    wanted = {module: set(names) for module, names in compat.CONNECTOR_NAMES.items()}
    assert imported_names(DOORS / "connector_contract.py") == wanted
    (module,) = (name for name, names in wanted.items() if "TransferJob" in names)
    found = {name: SimpleNamespace(**dict.fromkeys(wanted[name], object)) for name in wanted}
    del found[module].TransferJob
    refused = compat.refusal(
        ImportError("cannot import name"), compat.CONNECTOR_NAMES, load=found.__getitem__
    )
    assert str(refused) == f"this vLLM has no TransferJob in {module}: {VERSIONS}"


@pytest.mark.parametrize("source", sorted(DOORS.glob("*.py")), ids=lambda path: path.name)
def test_no_module_but_a_contract_imports_vllm_when_it_is_imported(source: Path) -> None:
    tree = ast.parse(source.read_text())
    imported: list[str | None] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            imported.append(node.module)
        elif isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
    assert not [name for name in imported if name and name.split(".")[0] == "vllm"]


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


@dataclasses.dataclass
class Event:
    """What an old vLLM says of residency."""

    keys: list[bytes]
    removed: bool


@dataclasses.dataclass
class LaterEvent(Event):
    """What a new one says."""

    ownership: str | None = None
    removal_expected: bool = False


def test_events_say_what_they_have_room_for() -> None:
    assert not compat.names_tiers(Event)
    assert compat.event_extras(Event) == {}
    assert compat.names_tiers(LaterEvent)
    assert compat.event_extras(LaterEvent) == {"removal_expected": True}


def test_a_requests_chunks_are_told_where_vllm_keeps_them() -> None:
    @dataclasses.dataclass
    class Context:
        req_id: str
        _offload_key_positions: dict[bytes, int]

    assert compat.chunk_positions(Job) is None
    told = compat.chunk_positions(Context)
    assert told is not None
    assert told(Context("a", {b"k": 32})) == {b"k": 32}


def test_a_pages_split_over_ranks_is_unknown_before_vllm_says_it() -> None:
    assert compat.page_mapping(SimpleNamespace(page_size_bytes=1)) is None
    assert compat.page_mapping(SimpleNamespace(mapping="m")) == "m"


def test_the_layout_vllm_chose_is_unknown_before_it_says_so() -> None:
    for cache, layout in [({}, "unknown"), ({"kv_cache_layout": None}, "unknown")]:
        config = SimpleNamespace(cache_config=SimpleNamespace(**cache))
        assert compat.kv_cache_layout(config) == layout
    config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_layout="LBHNC"))
    assert compat.kv_cache_layout(config) == "LBHNC"


def test_requests_are_named_where_vllm_has_a_class_for_it() -> None:
    base = "vllm.distributed.kv_transfer.kv_connector.v1.base"
    assert compat.transfer_results(vllm_with(**{base: SimpleNamespace()})) is None
    named = SimpleNamespace(KVConnectorTransferResults=Job)
    assert compat.transfer_results(vllm_with(**{base: named})) is Job


# -- vLLM's own halves


@dataclasses.dataclass
class Step:
    """What a vLLM's scheduler decides that knows of loads within the forward pass."""

    has_sync_kv_loads: bool


class Bound:
    """A connector that is told of the KV cache manager."""

    def bind_kv_cache_manager(self, manager: object) -> None: ...


@pytest.mark.parametrize(
    ("connector", "output", "first"),
    [(Bound, Step, True), (object, Step, False), (Bound, Job, False)],
    ids=["both", "no manager", "no sign of loads"],
)
def test_loads_come_before_the_pass_where_vllm_has_both_signs(
    connector: type[Any], output: type[Any], first: bool
) -> None:
    assert compat.loads_before_the_pass(connector, output) is first


def read_state() -> SimpleNamespace:
    """Return vLLM's scheduler half's module, with all that is read of its state."""

    def kept(name: str, *fields: str) -> type[Any]:
        return dataclasses.make_dataclass(name, fields)

    return SimpleNamespace(
        RequestOffloadState=kept(
            "RequestOffloadState",
            "group_states",
            "num_locally_computed_tokens",
            "partial_tail_boundary",
            "req",
            "transfer_jobs",
        ),
        RequestGroupState=kept("RequestGroupState", "next_stored_chunk_idx", "offload_keys"),
        SchedulerOffloadConfig=kept(
            "SchedulerOffloadConfig", "kv_group_configs", "tokens_per_hash"
        ),
        GroupOffloadConfig=kept("GroupOffloadConfig", "tokens_per_block", "tokens_per_chunk"),
    )


def test_a_half_is_known_if_all_that_is_read_of_it_is_there() -> None:
    half = SimpleNamespace(_jobs={}, _req_status={})

    def known(half: object, module: object) -> bool:
        return compat.half_is_known(half, lambda _: module)

    assert known(half, read_state())
    assert not known(SimpleNamespace(_jobs={}), read_state())
    for name in vars(read_state()):
        without = read_state()
        delattr(without, name)
        assert not known(half, without)
        setattr(without, name, Job)
        assert not known(half, without)


def test_a_half_without_source_was_not_read(tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    other = tmp_path / "other.py"
    other.write_text("# not vLLM's")
    assert not compat.source_was_read(missing)
    assert not compat.source_was_read(lambda _: SimpleNamespace(__file__=None))
    assert not compat.source_was_read(lambda _: SimpleNamespace(__file__=f"{tmp_path}/none"))
    assert not compat.source_was_read(lambda _: SimpleNamespace(__file__=str(other)))


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


def kv_cache_config(*sizes: int, stride: int = 0, blocks: int = 10) -> SimpleNamespace:
    """Return what vLLM 0.25 gives a spec second."""
    return SimpleNamespace(
        num_blocks=blocks,
        kv_cache_groups=[SimpleNamespace(layer_names=["layer.0", "layer.1"])],
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


def layer_of(backend: str = "FLASH_ATTN", **types: Any) -> SimpleNamespace:
    """Return a layer of vLLM's, with the element types it says it has."""
    attention = SimpleNamespace(get_name=lambda: backend)
    return SimpleNamespace(get_attn_backend=lambda: attention, **types)


FP8 = layer_of(kv_cache_dtype="fp8")
SKIPPED = layer_of(kv_cache_dtype="auto")


def worker_of(
    *layers: SimpleNamespace,
    version: str = "0.27.1",
    layout: str = "HND",
    dtype: str = "f",
    **cache: Any,
) -> Load:
    """Return the importer of a vLLM whose worker registers the KV memory of ``layers``."""
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            static_forward_context={
                f"layer.{number}": layer for number, layer in enumerate(layers or (FP8, FP8))
            }
        ),
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=SimpleNamespace(**cache),
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
    facts = compat.read_engine(spec, arguments)
    assert facts == dataclasses.replace(FACTS, kv_layout=None)
    assert spec.block_size_factor == 4
    assert facts.chunk_tokens == 128


def test_tensors_that_are_windows_into_one_are_counted_once() -> None:
    cases = [
        (kv_cache_config(20_480, 20_480), 4096),
        (kv_cache_config(40_960, 40_960, stride=4096), 4096),
        (kv_cache_config(blocks=0), 0),
    ]
    for config, nbytes in cases:
        facts = compat.read_engine(old_spec(), [vllm_config(), config])
        assert facts.worker_kv_bytes_per_block == nbytes


def test_every_layer_is_part_of_what_stored_bytes_are() -> None:
    workers = [
        worker_of(),
        worker_of(SKIPPED, FP8),
        worker_of(FP8, SKIPPED),
        worker_of(FP8, layer_of("FLASHINFER", kv_cache_dtype="fp8")),
        worker_of(FP8, layer_of("INDEXER", dtype="torch.uint8")),
        worker_of(FP8, layer_of("INDEXER", dtype="torch.int8")),
        worker_of(FP8, layer_of("MAMBA", get_state_dtype=lambda: ("f16", "f32"))),
        worker_of(FP8, layer_of("MAMBA", get_state_dtype=lambda: ("f32", "f16"))),
        worker_of(dtype="torch.float16"),
    ]
    contents = [compat.kv_content(FACTS, load=load) for load in workers]
    assert len(set(contents)) == len(contents)
    assert contents == [compat.kv_content(FACTS, load=load) for load in workers]
    renamed = dataclasses.replace(FACTS, rank=0, world_size=8, tp_size=8)
    assert compat.kv_content(renamed, load=workers[0]) == contents[0]


def test_a_vllm_that_tells_a_spec_the_layout_may_change_its_version() -> None:
    before, after = (worker_of(version=version) for version in ("0.29.0", "0.32.0"))
    assert compat.kv_content(FACTS, load=before) == compat.kv_content(FACTS, load=after)


def test_a_layout_that_a_spec_is_not_told_is_what_it_follows_from() -> None:
    facts = compat.read_engine(None, [offloading_config()])
    assert facts.kv_layout is None
    workers = [worker_of(), worker_of(version="0.28.0"), worker_of(layout="NHD")]
    contents = [compat.kv_content(facts, load=load) for load in workers]
    assert contents[0].startswith("f HND 0.27.1 ")
    assert len(set(contents)) == len(contents)


def test_scales_that_are_computed_at_every_start_are_refused() -> None:
    compat.kv_content(FACTS, load=worker_of(calculate_kv_scales=False))
    with pytest.raises(UnsupportedError, match="remove --calculate-kv-scales"):
        compat.kv_content(FACTS, load=worker_of(calculate_kv_scales=True))


def test_a_worker_that_is_not_told_either_refuses() -> None:
    facts = compat.read_engine(None, [offloading_config()])
    outside = SimpleNamespace(get_current_vllm_config_or_none=lambda: None)
    unknown = dataclasses.replace(facts, groups=((32, ("layer.7",)),))
    for engine, load in [
        (facts, vllm_with(vllm__config=outside)),
        (FACTS, vllm_with(vllm__config=outside)),
        (unknown, worker_of()),
    ]:
        with pytest.raises(UnsupportedError, match=r"what its KV cache holds.*0\.33"):
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
