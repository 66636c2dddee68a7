"""One file for several data-parallel ranks: the paths of each, and what all of them take."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kvtier.config import (
    KvtierConfig,
    NvmeTierConfig,
    check_environment,
    has_rank_paths,
    parse_config,
    resolve_rank_paths,
)
from kvtier.errors import ConfigError
from kvtier.tiers.slab.inspect import find_namespaces

PLACEHOLDER = "{data_parallel_rank}"


def ladder(path: Path | str, *, nvme: str = "2MiB", record: Path | str = "") -> KvtierConfig:
    """Return a configuration whose path is on line 5, and its recording's on line 8."""
    trace = f"trace:\n  record: {record}\n" if record else ""
    text = f"""\
tiers:
  - kind: ram
    capacity: 1MiB
  - kind: nvme
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
    config = ladder(f"/mnt/{PLACEHOLDER}/kv", record=f"/rec-{PLACEHOLDER}")
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
    config = ladder("/kv")
    assert resolve_rank_paths(config, rank=None) is config


def test_ranks_need_no_paths_where_nothing_is_on_a_disk() -> None:
    config = parse_config("tiers: [{kind: ram, capacity: 1MiB}]", source="a.yaml")
    assert resolve_rank_paths(config, rank=1) is config


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_would_share_paths_are_refused_with_what_to_write(rank: int) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_rank_paths(ladder("/var/lib/kvtier", record="/rec"), rank=rank)
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
        ladder(path)
    assert str(caught.value) == (
        f"a.yaml:5: tiers[1].path = {path}: a brace that is not of {PLACEHOLDER}, the only "
        "placeholder; write that, or a path without braces"
    )


def test_a_wrong_placeholder_of_a_recording_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("a.yaml:8: trace.record = /r/{pid}: a br")):
        ladder("/kv", record="/r/{pid}")


def test_memory_for_one_rank_is_not_memory_for_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = {"SC_PHYS_PAGES": 3, "SC_PAGE_SIZE": 1 << 19}
    monkeypatch.setattr(os, "sysconf", has.__getitem__)
    config = ladder(tmp_path / PLACEHOLDER)
    assert check_environment(config) == []
    with pytest.raises(ConfigError) as caught:
        check_environment(config, ranks=2)
    assert str(caught.value).startswith(
        "a.yaml:3: tiers[0].capacity = 1MiB: 2 ranks take 2.00 MiB, and this machine has 1.50"
    )


def test_a_directory_that_is_missing_for_all_ranks_is_one_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_environment(ladder(tmp_path / "no" / PLACEHOLDER), ranks=4)
    place, _, obstacle = str(caught.value).partition(": its parent ")
    assert place.startswith("a.yaml:5: tiers[1].path = ")
    missing = tmp_path / "no"
    assert obstacle == f"{missing} does not exist; mount the disk or run: mkdir -p {missing}"


def test_each_disk_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    with pytest.raises(ConfigError) as caught:
        check_environment(ladder(tmp_path / PLACEHOLDER / "kv"), ranks=3)
    missing = re.findall(r"its parent (\S+) does", str(caught.value))
    assert missing == [f"{tmp_path}/0", f"{tmp_path}/2"]


def test_a_check_for_ranks_that_would_share_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a directory of its own; write"):
        check_environment(ladder(tmp_path / "store"), ranks=2)


def test_looking_into_the_store_of_no_rank_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"with a number for {PLACEHOLDER}")):
        find_namespaces(tmp_path / PLACEHOLDER)
