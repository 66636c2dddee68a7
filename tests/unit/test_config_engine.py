"""What one engine gets of a file: its paths, its load path, its arguments, its chunk size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtier.config import (
    KvtierConfig,
    NvmeTierConfig,
    RamTierConfig,
    VllmEntryPoint,
    check_chunk_fits,
    has_rank_paths,
    parse_config,
    resolve_rank_paths,
    variable,
    variables,
    vllm_transfer_config,
    with_staged_loads,
)
from kvtier.errors import ConfigError
from kvtier.tiers.slab.inspect import find_namespaces

PLACEHOLDER = "{data_parallel_rank}"


def tiers_of(
    path: Path | str, *, kind: str = "nvme", nvme: str = "2MiB", record: Path | str = ""
) -> KvtierConfig:
    """Return a configuration whose path is on line 5, and its recording's on line 8."""
    trace = f"trace:\n  record: {record}\n" if record else ""
    text = f"""\
tiers:
  - kind: ram
    capacity: 1MiB
  - kind: {kind}
    path: {path}
    capacity: {nvme}
{trace}"""
    return parse_config(text, source="a.yaml")


def path_of(config: KvtierConfig) -> Path:
    tier = config.tiers[1]
    assert isinstance(tier, NvmeTierConfig)
    return tier.path


@pytest.mark.parametrize(
    ("rank", "store", "recording"),
    [(None, "/mnt/0/kv", "/rec-0"), (0, "/mnt/0/kv", "/rec-0"), (12, "/mnt/12/kv", "/rec-12")],
)
def test_a_rank_gets_its_number_wherever_it_stands_in_a_path(
    rank: int | None, store: str, recording: str
) -> None:
    config = tiers_of(f"/mnt/{PLACEHOLDER}/kv", record=f"/rec-{PLACEHOLDER}")
    mine = resolve_rank_paths(config, rank=rank)
    assert (path_of(mine), mine.trace.record) == (Path(store), Path(recording))
    assert path_of(config) == Path(f"/mnt/{PLACEHOLDER}/kv")
    assert mine.origin is config.origin
    assert (has_rank_paths(config), has_rank_paths(mine)) == (True, False)


def test_a_recording_alone_may_differ_between_ranks() -> None:
    text = f"tiers: [{{kind: ram, capacity: 1MiB}}]\ntrace: {{record: '/r/{PLACEHOLDER}'}}\n"
    config = parse_config(text, source="a.yaml")
    assert has_rank_paths(config)
    assert resolve_rank_paths(config, rank=3).trace.record == Path("/r/3")


def test_an_engine_that_is_alone_may_write_its_path_out() -> None:
    config = tiers_of("/kv")
    assert resolve_rank_paths(config, rank=None) is config


def test_ranks_need_no_paths_where_nothing_is_on_a_disk() -> None:
    config = parse_config("tiers: [{kind: ram, capacity: 1MiB}]", source="a.yaml")
    assert resolve_rank_paths(config, rank=1) is config


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_would_share_paths_are_refused_with_what_to_write(rank: int) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_rank_paths(tiers_of("/var/lib/kvtier", record="/rec"), rank=rank)
    what = "each data-parallel rank is an engine and needs a directory of its own; write"
    assert str(caught.value).splitlines() == [
        f"a.yaml:5: tiers[1].path = /var/lib/kvtier: {what} /var/lib/kvtier/{PLACEHOLDER}",
        f"a.yaml:8: trace.record = /rec: {what} /rec/{PLACEHOLDER}",
    ]


@pytest.mark.parametrize(
    "path", ["/kv/{rank}", "/kv/{data_parallel_rank", "/kv/{}", f"/kv/{{{PLACEHOLDER}}}"]
)
def test_a_wrong_placeholder_is_refused_with_the_right_one(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiers_of(path)
    assert str(caught.value) == (
        f"a.yaml:5: tiers[1].path = {path}: a brace outside {PLACEHOLDER}, the only "
        "placeholder; write that, or a path without braces"
    )


def test_a_shared_directory_of_one_rank_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        tiers_of(f"/kv/{PLACEHOLDER}", kind="shared_dir")
    assert str(caught.value) == (
        f"a.yaml:5: tiers[1].path = /kv/{PLACEHOLDER}: {PLACEHOLDER} in the path of a shared "
        "tier; all engines share one directory: leave it out"
    )


def test_a_wrong_placeholder_of_a_recording_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("a.yaml:8: trace.record = /r/{pid}: a br")):
        tiers_of("/kv", record="/r/{pid}")


def test_looking_into_the_store_of_no_rank_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"with a number for {PLACEHOLDER}")):
        find_namespaces(tmp_path / PLACEHOLDER)


def sized(path: Path, *, ram: str = "1MiB", nvme: str = "2MiB", more: str = "") -> KvtierConfig:
    """Return a configuration whose nvme tier starts on line 4."""
    text = f"""\
tiers:
  - kind: ram
    capacity: {ram}
  - kind: nvme
    path: {path}
    capacity: {nvme}
    {more}
"""
    return parse_config(text, source="a.yaml")


@pytest.fixture(autouse=True)
def _hashes_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def test_the_environment_is_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert variable("PYTHONHASHSEED") == "0"
    monkeypatch.delenv("PYTHONHASHSEED")
    assert variable("PYTHONHASHSEED") is None


def test_variables_are_found_by_their_whole_names_and_sorted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("KVTIER_TEST_B", "KVTIER_TEST_A", "KVTIER_TEST_AND_MORE", "A_KVTIER_TEST_A"):
        monkeypatch.setenv(name, "1")
    found = variables(re.compile("KVTIER_TEST_[AB]"))
    assert found == [("KVTIER_TEST_A", "1"), ("KVTIER_TEST_B", "1")]


def test_a_tier_needs_room_for_one_whole_slot(tmp_path: Path) -> None:
    config = sized(tmp_path, ram="8KiB")
    check_chunk_fits(config, 8192)
    with pytest.raises(ConfigError) as caught:
        check_chunk_fits(config, 8193)  # a slot is whole pages: 12 KiB
    assert str(caught.value) == (
        "a.yaml:3: tiers[0].capacity = 8KiB: smaller than one chunk, which takes 12KiB; "
        "raise the capacity or lower engine.blocks_per_chunk"
    )


def test_every_tier_that_is_too_small_for_a_chunk_is_named() -> None:
    tiers = (
        RamTierConfig(capacity_bytes=4096),
        NvmeTierConfig(path=Path("/kv"), capacity_bytes=8192),
    )
    with pytest.raises(ConfigError) as caught:
        check_chunk_fits(KvtierConfig(tiers=tiers), 1 << 20)
    ram, nvme = str(caught.value).splitlines()
    assert ram.startswith("tiers[0].capacity = 4KiB: smaller than one chunk, which takes 1MiB")
    assert nvme.startswith("tiers[1].capacity = 8KiB: ")


def test_the_spec_entry_point_stages_loads_and_refuses_direct_ones(tmp_path: Path) -> None:
    left_open = sized(tmp_path)
    assert left_open.transfer.load_path == "direct"
    staged = sized(tmp_path, more="\ntransfer: {load_path: staged}")
    for config in (left_open, staged):
        assert with_staged_loads(config).transfer.load_path == "staged"
    direct = sized(tmp_path, more="\ntransfer: {load_path: direct}")
    with pytest.raises(
        ConfigError, match=r"transfer\.load_path = direct: .* load_path: staged"
    ):
        with_staged_loads(direct)


def test_the_arguments_have_the_absolute_path_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    extra = vllm_transfer_config("a.yaml", sized(tmp_path))["kv_connector_extra_config"]
    assert extra["kvtier_config"] == str(tmp_path / "a.yaml")


def test_the_arguments_have_the_chunk_size_and_store_decode() -> None:
    text = (
        "tiers: [{kind: ram, capacity: 1GiB}]\nengine: {blocks_per_chunk: 4, store_decode: %s}"
    )
    for stored in ("true", "false"):
        config = parse_config(text % stored, source="a.yaml")
        for entry_point in VllmEntryPoint:
            printed = vllm_transfer_config("a.yaml", config, entry_point=entry_point)
            extra = printed["kv_connector_extra_config"]
            assert extra["blocks_per_chunk"] == 4
            # The connector reads the file, and vLLM's half reads its own option.
            wanted = stored == "false" if entry_point is VllmEntryPoint.SPEC else None
            assert extra.get("offload_prompt_only") is wanted


def test_the_spec_entry_point_refuses_required_gds_reads_and_ignores_optional_ones() -> None:
    text = (
        "tiers:\n- {kind: ram, capacity: 1GiB}\n"
        "- {kind: nvme, path: /kv, capacity: 1GiB, gds: %s}\n"
    )
    optional = parse_config(text % "auto", source="a.yaml")
    assert optional.gds_tier == "nvme"
    assert with_staged_loads(optional).gds_tier is None
    required = parse_config(text % "require", source="a.yaml")
    with pytest.raises(ConfigError, match=r"a.yaml:3: tiers\[1\]\.gds"):
        with_staged_loads(required)
