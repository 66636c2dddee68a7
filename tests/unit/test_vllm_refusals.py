"""Engines that do not start with kvtier, and what the message says to do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.config import KvtierConfig, parse_config
from kvtier.errors import ConfigError, UnsupportedError
from kvtier.vllm.engine import EngineFacts
from kvtier.vllm.refusals import refuse_layout, refuse_worker
from tests.unit.test_vllm_content import FACTS
from tests.unit.vllm_modules import model_settings


def config(blocks_per_chunk: int = 4, capacity: str = "1GiB") -> KvtierConfig:
    return parse_config(
        f"tiers: [{{kind: ram, capacity: {capacity}}}]\n"
        f"engine: {{blocks_per_chunk: {blocks_per_chunk}}}",
        source="kvtier.yaml",
    )


def test_an_engine_that_fits_its_file_starts() -> None:
    refuse_layout(FACTS, config())


LAYOUTS: list[tuple[dict[str, Any], str]] = [
    ({"pp_size": 2}, "tensor parallelism only; .* sizes are 2, 1 and 1"),
    ({"pcp_size": 3}, "sizes are 1, 3 and 1"),
    ({"dcp_size": 4}, "sizes are 1, 1 and 4"),
    ({"kv_layout": "LHBNC"}, "start vLLM with VLLM_KV_CACHE_LAYOUT=LBHNC"),
    ({"canonical_layout": True}, "canonical_layout: remove it"),
    ({"worker_kv_bytes_per_block": 0}, "no KV cache: start vLLM without kvtier"),
]


@pytest.mark.parametrize(("changes", "text"), LAYOUTS, ids=str)
def test_layouts_that_cannot_be_stored_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        refuse_layout(replace(FACTS, **changes), config())


def test_another_chunk_size_than_the_files_is_refused_with_both() -> None:
    with pytest.raises(ConfigError, match="is 2 in the file but vLLM was started with 4"):
        refuse_layout(FACTS, config(blocks_per_chunk=2))


def test_a_tier_that_is_smaller_than_a_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.capacity .*smaller than one chunk"):
        refuse_layout(FACTS, config(capacity="8KiB"))


def worker(
    layer: Any = None,
    *,
    model: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
) -> Any:
    """Return vLLM's configuration in a worker with two layers."""
    layers = {
        name: layer or SimpleNamespace(kv_cache_dtype="auto") for name in FACTS.groups[0][1]
    }
    settings = model_settings(
        model,
        compilation_config=SimpleNamespace(static_forward_context=layers),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )
    vars(settings.parallel_config).update(parallel or {})
    return settings


def test_a_worker_of_a_usual_engine_starts() -> None:
    refuse_worker(worker(), FACTS)


def test_scales_that_vllm_resets_after_a_load_are_refused() -> None:
    layer = SimpleNamespace(kv_cache_dtype="fp8_per_token_head")
    with pytest.raises(UnsupportedError, match=r"layer layer\.0 .*another --kv-cache-dtype"):
        refuse_worker(worker(layer), FACTS)


def test_workers_on_several_hosts_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"run on 2 hosts, .* an engine on each host"):
        refuse_worker(worker(parallel={"nnodes_within_dp": 2}), FACTS)


def test_a_scheduler_for_each_of_several_workers_is_refused() -> None:
    external = worker(parallel={"distributed_executor_backend": "external_launcher"})
    refuse_worker(external, replace(FACTS, rank=0, world_size=1))
    with pytest.raises(UnsupportedError, match=r"each of the 2 workers .* use mp"):
        refuse_worker(external, FACTS)


def test_an_engine_that_goes_on_after_a_failed_step_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="remove --enable-fault-tolerance"):
        refuse_worker(worker(parallel={"enable_fault_tolerance": True}), FACTS)


@pytest.mark.parametrize(
    ("engine", "sleeps", "in_process", "refused"),
    [
        (FACTS, True, True, True),
        (FACTS, True, False, False),
        (FACTS, False, True, False),
        (replace(FACTS, rank=0, world_size=1), True, True, False),
    ],
    ids=["several workers", "own process", "no sleep mode", "one worker"],
)
def test_sleeping_beside_workers_in_other_processes_is_refused(
    engine: EngineFacts,
    sleeps: bool,
    in_process: bool,
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(not in_process)))
    sleeping = worker(model={"enable_sleep_mode": sleeps})
    if not refused:
        refuse_worker(sleeping, engine)
        return
    with pytest.raises(UnsupportedError, match="unset that variable, or start without sleep"):
        refuse_worker(sleeping, engine)
