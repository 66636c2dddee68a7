"""Checks that need this machine, or the size of a chunk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.config import (
    KvtierConfig,
    NvmeTierConfig,
    RamTierConfig,
    VllmEntryPoint,
    allocated_bytes,
    check_chunk_fits,
    check_environment,
    environment,
    parse_config,
    resolve_load_path,
    vllm_transfer_config,
)
from kvtier.errors import ConfigError


def ladder(
    path: Path, *, ram: str = "1MiB", nvme: str = "2MiB", more: str = ""
) -> KvtierConfig:
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


def test_a_directory_that_kvtier_can_make_is_fine_and_is_not_made(tmp_path: Path) -> None:
    assert check_environment(ladder(tmp_path / "store")) == []
    assert list(tmp_path.iterdir()) == []


def test_checking_leaves_nothing_in_a_store(tmp_path: Path) -> None:
    assert check_environment(ladder(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/proc/version", "not a directory; name a directory"),
        ("/proc/no/such/store", "its parent /proc/no/such does not exist; mount"),
        ("/proc/version/store", "its parent /proc/version is not a directory; name a dir"),
        ("/proc/version/deep/store", "its parent /proc/version is not a directory; name"),
        ("/proc", "/proc is not writable: "),
        ("/proc/store", "/proc is not writable: "),
    ],
)
def test_a_path_without_room_for_a_store_is_refused(path: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_environment(ladder(Path(path)))
    assert str(caught.value).startswith(f"a.yaml:5: tiers[1].path = {path}: {problem}")


def test_a_link_to_a_disk_that_is_not_mounted_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "store"
    link.symlink_to(tmp_path / "mounted" / "kvtier")
    with pytest.raises(ConfigError) as caught:
        check_environment(ladder(link))
    problem = f": leads to {tmp_path}/mounted/kvtier, which does not exist; create it, or mount"
    assert problem in str(caught.value)


def test_a_path_that_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be looked at: File name too long; run this"):
        check_environment(ladder(tmp_path / ("x" * 300)))


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/proc", "; give it to the user that runs the engine"),
        ("/proc/store", "; make the directory as root and give it to the user"),
    ],
)
def test_no_one_is_told_to_open_the_parent_of_a_store(path: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_environment(ladder(Path(path)))
    assert remedy in str(caught.value)


def test_more_memory_than_there_is_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_environment(ladder(tmp_path, ram="1024PiB", nvme="2048PiB"))
    memory = "a.yaml:3: tiers[0].capacity = 1024PiB: this machine has "
    assert str(caught.value).startswith(memory)


def test_a_directory_that_vanishes_while_it_is_measured_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vanishing = tmp_path / "namespace"
    vanishing.mkdir()
    scan = os.scandir

    def scan_too_late(path: str) -> Iterator[os.DirEntry[str]]:
        if Path(path) == vanishing:
            vanishing.rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_too_late)
    allocated_bytes(tmp_path)
    assert not vanishing.exists()


def test_a_slower_tier_that_is_no_larger_is_a_warning(tmp_path: Path) -> None:
    (warning,) = check_environment(ladder(tmp_path, ram="2MiB"))
    assert warning.startswith("a.yaml:6: tiers[1].capacity = 2MiB: no larger than the faster")


def test_what_is_said_of_slower_tiers_is_a_warning_where_there_are_none(
    tmp_path: Path,
) -> None:
    said = "placement: {write_after: 2, admit: tinylfu, write_budget_per_day: 1GiB}\n"
    alone = parse_config(f"tiers: [{{kind: ram, capacity: 1MiB}}]\n{said}", source="a.yaml")
    warnings = check_environment(alone)
    assert [warning.partition(": no effect")[0] for warning in warnings] == [
        "a.yaml:2: placement.write_after = 2",
        "a.yaml:2: placement.admit = tinylfu",
        "a.yaml:2: placement.write_budget_per_day = 1GiB",
    ]
    assert check_environment(ladder(tmp_path, more=f"\n{said}")) == []


def test_a_store_without_checksums_is_a_warning(tmp_path: Path) -> None:
    (warning,) = check_environment(ladder(tmp_path, more="checksum: off"))
    assert warning.startswith("a.yaml:7: tiers[1].checksum = off: a flipped bit")


def test_the_environment_is_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment().python_hash_seed == "0"
    monkeypatch.delenv("PYTHONHASHSEED")
    assert environment().python_hash_seed is None


def test_a_tier_needs_room_for_one_whole_slot(tmp_path: Path) -> None:
    config = ladder(tmp_path, ram="8KiB")
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


@pytest.mark.parametrize(("entry_point", "path"), [("connector", "direct"), ("spec", "staged")])
def test_the_load_path_left_open_is_the_doors_and_one_asked_for_stays(
    tmp_path: Path, entry_point: str, path: str
) -> None:
    left_open = ladder(tmp_path)
    resolved = resolve_load_path(left_open, VllmEntryPoint(entry_point))
    assert resolved.transfer.load_path == path
    assert resolve_load_path(resolved, VllmEntryPoint(entry_point)) is resolved
    assert left_open.transfer.load_path == "auto"
    staged = ladder(tmp_path, more="\ntransfer: {load_path: staged}")
    assert resolve_load_path(staged, VllmEntryPoint(entry_point)).transfer.load_path == "staged"


def test_the_engine_is_told_where_the_file_is_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    extra = vllm_transfer_config("a.yaml", ladder(tmp_path))["kv_connector_extra_config"]
    assert extra["kvtier_config"] == str(tmp_path / "a.yaml")


def test_the_engine_is_told_the_chunk_size_and_whether_to_keep_decoded_tokens() -> None:
    text = (
        "tiers: [{kind: ram, capacity: 1GiB}]\nengine: {blocks_per_chunk: 4, store_decode: %s}"
    )
    for stored in ("true", "false"):
        config = parse_config(text % stored, source="a.yaml")
        extra = vllm_transfer_config("a.yaml", config)["kv_connector_extra_config"]
        assert extra["blocks_per_chunk"] == 4
        assert extra["offload_prompt_only"] is (stored == "false")
