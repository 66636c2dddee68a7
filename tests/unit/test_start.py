"""What ``check``, ``doctor`` and ``vllm-args`` report of a store is what a start does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from kvtier.config import KvtierConfig, NvmeTierConfig, RamTierConfig, parse_config
from kvtier.doctor import Examination, Status, examine
from kvtier.errors import CacheDamagedError, ConfigError
from kvtier.os.block_io import BlockIo
from kvtier.tiers.slab.inspect import find_namespaces
from kvtier.tiers.slab.maintain import hold
from tests.unit.other_user import give_away
from tests.unit.slab_locks import held
from tests.unit.stores import FIELDS, SLOT, SLOTS, Store

PLACEHOLDER = "{data_parallel_rank}"
OTHER = {**FIELDS, "model": "another"}
MIB = 1 << 20


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the free bytes of every disk."""
    return lambda free: monkeypatch.setattr(BlockIo, "free_nbytes", lambda *_: free)


def config_of(store: Store, *, more: str = "") -> KvtierConfig:
    text = f"""\
tiers:
  - kind: ram
    capacity: 64KiB
  - kind: nvme
    path: {store.root}
    capacity: {SLOTS * SLOT}B
    {more}
"""
    return parse_config(text, source="a.yaml")


def tiers_of(path: Path, *, capacity: str = "2MiB", more: str = "") -> KvtierConfig:
    text = f"""\
tiers:
  - kind: ram
    capacity: 1MiB
  - kind: nvme
    path: '{path}'
    capacity: {capacity}
{more}"""
    return parse_config(text, source="a.yaml")


def of_stores(
    config: KvtierConfig, identity: Mapping[str, str | int], *, ranks: int = 1
) -> Examination:
    """Return the findings about caches and their room."""
    examination = examine(config, identity, ranks=ranks)
    checks = (": cache", ": free space")
    findings = [each for each in examination.findings if each.check.endswith(checks)]
    return Examination(findings)


def problems(
    config: KvtierConfig, identity: Mapping[str, str | int], *, ranks: int = 1
) -> list[str]:
    return of_stores(config, identity, ranks=ranks).lines(Status.PROBLEM)


def test_a_cache_of_another_identity_is_named_field_by_field_and_the_start_agrees(
    store: Store,
) -> None:
    store.filled()
    report = of_stores(config_of(store), OTHER)
    (problem,) = report.lines(Status.PROBLEM)
    assert problem.startswith("a.yaml:4: tiers[1].on_mismatch: the capacity of 128 KiB is not ")
    assert "model is 'some/model' there and 'another' here" in problem
    with pytest.raises(ConfigError) as refusal:
        store.start(model="another")
    difference = problem.partition("on_mismatch: ")[2].partition(", used ")[0]
    assert difference in str(refusal.value)


def test_a_cache_that_a_start_would_remove_is_a_warning(store: Store) -> None:
    store.filled()
    report = of_stores(config_of(store, more="on_mismatch: remove"), OTHER)
    assert report.lines(Status.PROBLEM) == []
    (warning,) = report.lines(Status.WARNING)
    assert f"removing the cache of model some/model in {store.directory}" in warning
    assert "(128 KiB with 16 chunks, used " in warning
    assert store.start(model="another", on_mismatch="remove") == []
    assert not store.directory.exists()


def test_a_cache_that_was_not_used_for_keep_for_is_named_before_it_is_removed(
    store: Store,
) -> None:
    store.filled()
    report = of_stores(config_of(store, more="keep_for: 0.000001ms"), OTHER)
    assert report.lines(Status.PROBLEM) == []
    assert "removing the cache of model some/model" in "".join(report.lines(Status.WARNING))


def test_a_cache_that_the_next_start_would_empty_after_a_reset_does_not_refuse_another(
    store: Store,
) -> None:
    store.start()
    store.reset()
    store.fill()
    store.stop()
    report = of_stores(config_of(store), OTHER)
    assert report.lines(Status.PROBLEM) == []
    assert "(128 KiB with 0 chunks, used " in "".join(report.lines(Status.WARNING))
    assert store.start(model="another") == []
    assert not store.directory.exists()


def test_where_the_model_is_not_known_the_note_says_what_another_one_would_do(
    store: Store,
) -> None:
    store.filled()
    known = {name: FIELDS[name] for name in FIELDS if name != "model"}
    for more, does in [("", "does not start"), ("on_mismatch: remove", "removes it")]:
        report = of_stores(config_of(store, more=more), known)
        assert (report.lines(Status.PROBLEM), report.lines(Status.WARNING)) == ([], [])
        (note,) = report.lines(Status.NOTE)
        assert "the cache of model some/model" in note
        assert f"with another model or other settings {does}" in note


def test_a_cache_that_a_live_engine_has_open_is_a_problem_that_names_its_pid(
    store: Store,
) -> None:
    store.start()
    (problem,) = problems(config_of(store), FIELDS)
    assert f"{store.directory} is in use by pid {os.getpid()} on host " in problem
    store.stop()
    assert problems(config_of(store), FIELDS) == []


def test_another_models_live_engine_is_a_warning_that_the_disk_takes_both(
    store: Store,
) -> None:
    store.start()
    report = of_stores(config_of(store), OTHER)
    assert report.lines(Status.PROBLEM) == []
    (warning,) = report.lines(Status.WARNING)
    assert f"pid {os.getpid()} on host " in warning
    assert "together they take 128 KiB and 128 KiB" in warning


def test_a_tool_at_work_is_a_problem_in_the_own_cache_and_waited_for_in_another(
    store: Store,
) -> None:
    store.filled()
    (space,) = find_namespaces(store.root)
    with hold(space, "stop it"):
        assert "let it finish" in "\n".join(problems(config_of(store), FIELDS))
        report = of_stores(config_of(store), OTHER)
    assert report.lines(Status.PROBLEM) == []
    assert "a start waits for it" in report.lines(Status.WARNING)[0]


def test_a_store_that_is_being_opened_is_not_waited_for_long(store: Store) -> None:
    store.filled()
    with held(store.root):
        (problem,) = problems(config_of(store), FIELDS)
    assert problem.startswith("a.yaml:5: tiers[1].path = ")
    assert f"another process is opening {store.root}; try again" in problem


def test_the_index_needs_room_besides_the_chunks(
    store: Store, offer: Callable[[int], None]
) -> None:
    offer(20 * MIB)
    (problem,) = problems(config_of(store), FIELDS)
    assert "and 20.0 MiB for the index; the disk has 20.0 MiB; lower the" in problem
    with pytest.raises(ConfigError, match=r"with 20\.0 MiB for the index, does not fit"):
        store.start()
    offer(21 * MIB)
    assert problems(config_of(store), FIELDS) == []


def test_foreign_files_are_no_room(store: Store, offer: Callable[[int], None]) -> None:
    store.root.mkdir()
    (store.root / "somebody's").write_bytes(bytes(64 * MIB))
    offer(0)
    assert "the disk has 0 B" in "\n".join(problems(config_of(store), FIELDS))


def test_room_that_the_cache_has_reserved_counts_as_free(
    store: Store, offer: Callable[[int], None]
) -> None:
    store.filled()
    offer(0)
    assert problems(config_of(store), FIELDS) == []


def test_the_room_of_a_cache_that_a_start_removes_counts_as_free(
    store: Store, offer: Callable[[int], None]
) -> None:
    store.filled()
    offer(20 * MIB + SLOT)
    config = config_of(store, more="on_mismatch: remove")
    assert problems(config, OTHER) == []


def test_an_index_of_another_version_refuses_the_start_unless_on_mismatch_removes_it(
    store: Store,
) -> None:
    store.filled().sql("PRAGMA user_version=9")
    text = "\n".join(problems(config_of(store), FIELDS))
    assert "tiers[1].on_mismatch: " in text
    assert "it has version 9, and this kvtier reads 1; start the kvtier" in text
    assert problems(config_of(store, more="on_mismatch: remove"), FIELDS) == []


def test_a_cache_of_another_version_refuses_the_start(store: Store) -> None:
    store.filled()
    layout = store.directory / "layout.json"
    layout.write_text(layout.read_text().replace('"version": 1', '"version": 2'))
    (line,) = problems(config_of(store), FIELDS)
    assert "was made by another version of kvtier" in line


def test_a_cache_of_unknown_size_is_a_warning(store: Store) -> None:
    store.filled()
    (store.directory / "layout.json").write_text("{}")
    (warning,) = of_stores(config_of(store), OTHER).lines(Status.WARNING)
    assert "looks like a cache of kvtier's, but it has slots" in warning


def test_a_store_that_may_not_be_read_is_a_problem(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.filled()

    def refuse(path: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert "run this as the user" in "\n".join(problems(config_of(store), FIELDS))


def test_a_cache_of_another_users_is_a_problem_as_it_is_for_the_start(store: Store) -> None:
    store.filled()
    give_away(store.directory / "slots.bin")
    report = of_stores(config_of(store), FIELDS)
    assert f"{store.directory} cannot be used: " in "\n".join(report.lines(Status.PROBLEM))
    with pytest.raises(CacheDamagedError, match="belongs to user"):
        store.start()


def test_an_examination_changes_nothing_in_a_store(store: Store) -> None:
    store.filled()
    before = store.seen()
    of_stores(config_of(store), OTHER)
    assert store.seen() == before


def test_tiers_on_one_disk_need_room_for_both(
    tmp_path: Path, offer: Callable[[int], None]
) -> None:
    offer(45 * MIB)
    second = f"  - {{kind: nvme, name: large, path: {tmp_path}/large, capacity: %s}}\n"
    fitting = tiers_of(tmp_path / "fast", more=second % "3MiB")
    assert problems(fitting, {}) == []
    (problem,) = problems(tiers_of(tmp_path / "fast", more=second % "4MiB"), {})
    assert problem.startswith(
        "a.yaml:7: tiers[2].capacity = 4MiB: needs 4.00 MiB and 20.0 MiB for the index; the "
        "disk has 23.0 MiB beside nvme; lower the capacity"
    )


def test_room_for_one_rank_is_not_room_for_two(
    tmp_path: Path, offer: Callable[[int], None]
) -> None:
    config = tiers_of(tmp_path / PLACEHOLDER)
    offer(43 * MIB)
    assert problems(config, {}) == []
    (problem,) = problems(config, {}, ranks=2)
    assert problem.startswith(
        "a.yaml:6: tiers[1].capacity = 2MiB: 2 ranks need 4.00 MiB and 40.0 MiB for the "
        "index; the disk has 43.0 MiB; lower the capacity"
    )
    offer(44 * MIB)
    assert problems(config, {}, ranks=2) == []


def test_more_memory_and_disk_than_there_is_are_two_problems(tmp_path: Path) -> None:
    config = KvtierConfig(
        tiers=(
            RamTierConfig(capacity_bytes=1 << 60),
            NvmeTierConfig(path=tmp_path, capacity_bytes=1 << 61),
        )
    )
    disk, memory = examine(config).lines(Status.PROBLEM)
    assert "the disk has " in disk
    assert "available memory leaves" in memory
