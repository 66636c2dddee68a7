"""Whose directory it is: modes, locks, foreign files, other models, other capacities."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import NvmeTierConfig
from kvtier.errors import ConfigError, StoreDamagedError, StoreLockedError
from kvtier.iopool import IoPool
from kvtier.testing.chunks import make_keys, make_sources
from kvtier.testing.faulty_io import FaultyIo
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier, store
from kvtier.tiers.slab.direct_io import BlockIo
from kvtier.tiers.slab.inspect import find_namespaces, holder_of
from kvtier.types import LayoutFingerprint, Outcome, Why

SLOT = 4096
KEYS = make_keys(range(8))

Opener = Callable[..., SlabTier]


def fingerprint(model: str, ranks: int = 1) -> LayoutFingerprint:
    return LayoutFingerprint({"model": model, "ranks": ranks})


@pytest.fixture
def pool() -> Iterator[IoPool]:
    pool = IoPool(2, name="kvtier-test")
    yield pool
    assert pool.close(timeout_s=10)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def own(root: Path) -> Path:
    return root / fingerprint("m").namespace()


@pytest.fixture
def open_tier(root: Path, pool: IoPool) -> Iterator[Opener]:
    opened: list[SlabTier] = []

    def open_tier(
        *,
        model: str = "m",
        ranks: int = 1,
        slots: int = 8,
        slot_nbytes: int = SLOT,
        io: BlockIo | None = None,
        path: Path = root,
    ) -> SlabTier:
        options = NvmeTierConfig(path=path, capacity_bytes=slots * SLOT, direct_io="off")
        context = TierContext(slot_nbytes, fingerprint(model, ranks), pool)
        opened.append(SlabTier.open(options, context, io=io))
        return opened[-1]

    yield open_tier
    for tier in opened:
        close(tier)


def close(tier: SlabTier) -> None:
    asyncio.run(tier.aclose())


def fill(tier: SlabTier, count: int = 8) -> None:
    sources = make_sources(KEYS[:count], tier.slot_nbytes)
    result = asyncio.run(tier.write(KEYS[:count], range(count), sources, why=Why.STORE))
    assert set(result.outcomes) == {Outcome.DONE}


def slots_of(tier: SlabTier) -> list[int]:
    return [slot for _, slot in tier.recovered()]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING" and record.name.startswith("kvtier")
    ]


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_only_the_owner_gets_in_whatever_the_umask(
    open_tier: Opener, root: Path, umask: int
) -> None:
    former = os.umask(umask)
    try:
        fill(open_tier())
    finally:
        os.umask(former)
    for path in [root, *root.rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_no_file_is_left_open_to_a_child(open_tier: Opener, root: Path) -> None:
    open_tier()
    ours = [
        int(link.name)
        for link in Path("/proc/self/fd").iterdir()
        if os.path.realpath(link).startswith(str(root))
    ]
    assert len(ours) >= 3
    assert not any(os.get_inheritable(fd) for fd in ours)


def test_a_second_opener_in_this_process_is_told_who_holds_the_store(
    open_tier: Opener,
) -> None:
    tier = open_tier()
    with pytest.raises(StoreLockedError, match=f"pid {os.getpid()} on host ") as caught:
        open_tier()
    assert caught.value.holder.startswith(f"pid {os.getpid()} ")
    close(tier)
    open_tier()


HOLDER = """
import pathlib, sys
from kvtier.config import NvmeTierConfig
from kvtier.iopool import IoPool
from kvtier.tiers.base import TierContext
from kvtier.tiers.slab import SlabTier
from kvtier.types import LayoutFingerprint
options = NvmeTierConfig(path=pathlib.Path(sys.argv[1]), capacity_bytes=8 * 4096)
pool = IoPool(1, name="kvtier-holder")
context = TierContext(4096, LayoutFingerprint({"model": "m", "ranks": 1}), pool)
tier = SlabTier.open(options, context)
sys.stdout.write("open\\n")
sys.stdout.flush()
sys.stdin.read()
"""


PARENT = (
    HOLDER[: HOLDER.index("sys.stdout")]
    + """
import os, signal
if os.fork():
    os.kill(os.getpid(), signal.SIGKILL)
os.read(int(sys.argv[2]), 1)
os._exit(0)
"""
)


def test_a_second_engine_is_told_the_pid_of_the_first(open_tier: Opener, root: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(StoreLockedError, match=f"pid {holder.pid} on host "):
            open_tier()
        holder.kill()
    open_tier()  # the lock dies with its holder


def test_two_models_have_the_store_open_side_by_side(open_tier: Opener) -> None:
    for model in ("a", "b"):
        fill(open_tier(model=model))


def test_another_model_sees_nothing_of_the_first(open_tier: Opener, root: Path) -> None:
    tier = open_tier(model="a")
    fill(tier)
    assert slots_of(open_tier(model="b")) == []
    assert len([path for path in root.iterdir() if path.is_dir()]) == 2


def test_a_model_upgrade_stays_within_capacity(
    open_tier: Opener, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(model="old/model")
    fill(tier)
    close(tier)
    open_tier(model="new")
    total = sum(path.stat().st_size for path in root.rglob("slots.bin"))
    assert total <= 8 * SLOT
    [warning] = warnings_in(caplog)
    assert "old/model" in warning
    assert "32.0 KiB" in warning
    assert [path.name for path in root.iterdir() if path.is_dir()] == [
        fingerprint("new").namespace()
    ]


def test_another_number_of_ranks_does_not_cost_the_cache(open_tier: Opener, own: Path) -> None:
    before = open_tier(ranks=1)
    fill(before)
    close(before)
    with pytest.raises(
        ConfigError, match=r"for 1 ranks .* an engine of 2 cannot read"
    ) as caught:
        open_tier(ranks=2)
    assert str(own) in str(caught.value)
    assert len(slots_of(open_tier(ranks=1))) == 8


def test_two_numbers_of_ranks_share_a_store_that_has_room_for_both(
    open_tier: Opener, root: Path
) -> None:
    before = open_tier(ranks=1, slots=4)
    fill(before, 4)
    close(before)
    open_tier(ranks=2, slots=9, slot_nbytes=5 * SLOT)  # one slot: nine pages in all
    kept = {path.name for path in root.iterdir() if path.is_dir()}
    assert kept == {fingerprint("m", ranks).namespace() for ranks in (1, 2)}


def test_the_least_recently_opened_model_leaves_first(open_tier: Opener, root: Path) -> None:
    tiers = {model: open_tier(model=model, slots=3) for model in ("recent", "ancient")}
    for opened_ns, model in enumerate(("ancient", "recent")):
        close(tiers[model])
        os.utime(root / fingerprint(model).namespace() / "lock", ns=(0, opened_ns))
    # The new model's one slot takes five of nine pages: room for one of the others, not both.
    open_tier(model="new", slots=9, slot_nbytes=5 * SLOT)
    kept = {path.name for path in root.iterdir() if path.is_dir()}
    assert kept == {fingerprint(model).namespace() for model in ("recent", "new")}


def test_a_model_in_use_is_not_removed_for_another(open_tier: Opener) -> None:
    old = open_tier(model="old")
    fill(old)
    open_tier(model="new")
    close(old)
    assert slots_of(open_tier(model="old")) == list(range(8))


def test_what_two_engines_filled_side_by_side_is_within_the_cap_when_one_starts_alone(
    open_tier: Opener, root: Path
) -> None:
    tiers = [open_tier(model=model) for model in ("a", "b")]
    for tier in tiers:
        fill(tier)
    close(tiers[0])
    first = open_tier(model="a")
    assert slots_of(first) == list(range(8)), "the other one is in use and left alone"
    for tier in (first, tiers[1]):
        close(tier)
    assert slots_of(open_tier(model="a")) == list(range(8))
    assert len(list(root.glob("*/slots.bin"))) == 1


def test_nothing_is_removed_for_a_slab_that_will_not_fit(open_tier: Opener) -> None:
    tier = open_tier(model="old")
    fill(tier)
    close(tier)
    io = FaultyIo()
    io.offer(free_nbytes=0)
    with pytest.raises(ConfigError, match="does not fit"):
        open_tier(model="new", slots=9, io=io)
    assert slots_of(open_tier(model="old")) == list(range(8))


def test_an_index_needs_room_besides_the_slots_when_these_are_made_or_grow(
    open_tier: Opener,
) -> None:
    io = FaultyIo()
    io.offer(free_nbytes=19 << 20)
    with pytest.raises(ConfigError, match=r"32\.0 KiB, with 20\.0 MiB for the index, does not"):
        open_tier(io=io)
    close(open_tier())
    close(open_tier(io=io))
    with pytest.raises(ConfigError, match=r"free; lower capacity or make room"):
        open_tier(slots=9, io=io)


def test_what_another_version_made_counts_and_stays(
    open_tier: Opener, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    close(open_tier(model="future"))
    future = root / fingerprint("future").namespace()
    edit_layout(future, version=2)
    close(open_tier(model="old", slots=3))
    caplog.clear()
    open_tier(model="new", slots=24, slot_nbytes=5 * SLOT)  # 20 pages; with the old ones 23
    assert (future / "slots.bin").stat().st_size == 8 * SLOT
    told, removed = warnings_in(caplog)
    assert f"{future} (32.0 KiB) was made by another version of kvtier" in told
    assert "removing the cache of model old" in removed


def test_what_another_version_has_open_counts_against_its_own_engine(
    open_tier: Opener, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    close(open_tier(model="future"))
    future = root / fingerprint("future").namespace()
    edit_layout(future, version=2)
    close(open_tier(model="old", slots=3))
    caplog.clear()
    with (future / "lock").open("rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        open_tier(model="new", slots=24, slot_nbytes=5 * SLOT)
    assert warnings_in(caplog) == []
    assert (root / fingerprint("old").namespace()).is_dir()


def test_what_a_removal_cut_short_left_of_another_model_goes_at_the_next_start(
    open_tier: Opener, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(model="old", ranks=2, slots=2)
    fill(tier, 2)
    close(tier)
    (root / fingerprint("old", 2).namespace() / "slots.bin").unlink()
    open_tier(model="old", slots=2)
    assert [path.name for path in root.iterdir() if path.is_dir()] == [
        fingerprint("old").namespace()
    ]
    assert warnings_in(caplog) == []


def test_a_tier_that_cannot_be_made_leaves_nothing_open(
    open_tier: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(capacity_slots: int) -> None:
        raise MemoryError

    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    close(open_tier())
    before = held()
    with monkeypatch.context() as patch:
        patch.setattr(store, "SlotTable", fail)
        with pytest.raises(MemoryError):
            open_tier()
    assert held() == before
    open_tier()


def test_a_child_that_outlives_the_engine_does_not_keep_the_store(
    open_tier: Opener, root: Path
) -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-c", PARENT, str(root), str(reading)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[reading]) as parent:
        os.close(reading)
        assert parent.wait(60) == -signal.SIGKILL  # its child lives until the pipe is closed
        try:
            open_tier()
        finally:
            os.close(writing)


def test_what_is_not_ours_is_neither_counted_nor_removed(
    open_tier: Opener, root: Path, tmp_path: Path
) -> None:
    root.mkdir()
    look_alike = root / "0123456789abcdef"
    look_alike.mkdir()
    (look_alike / "slots.bin").write_bytes(bytes(20 * SLOT))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "slots.bin").write_bytes(b"precious")
    (root / fingerprint("linked").namespace()).symlink_to(elsewhere)
    (root / "notes.txt").write_text("mine")
    open_tier()
    assert (look_alike / "slots.bin").stat().st_size == 20 * SLOT
    assert (elsewhere / "slots.bin").read_bytes() == b"precious"
    assert (root / "notes.txt").read_text() == "mine"


def test_a_stranger_in_a_namespace_survives_its_removal(open_tier: Opener, root: Path) -> None:
    close(open_tier(model="old"))
    stranger = root / fingerprint("old").namespace() / "thesis.tex"
    stranger.write_text("chapter 1")
    open_tier(model="new")
    assert stranger.read_text() == "chapter 1"
    assert not stranger.with_name("slots.bin").exists()


@pytest.mark.parametrize(
    "name", ["slots.bin", "index.sqlite", "index.sqlite-wal", "lock", "layout.json"]
)
def test_a_symbolic_link_in_place_of_a_file_is_refused(
    open_tier: Opener, own: Path, tmp_path: Path, name: str
) -> None:
    close(open_tier())
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (own / name).unlink(missing_ok=True)
    (own / name).symlink_to(target)
    with pytest.raises(StoreDamagedError, match=f"{name} is not a plain file; move it away"):
        open_tier()
    assert target.read_bytes() == b"precious"


def test_a_symbolic_link_in_place_of_the_lock_of_the_store_is_refused(
    open_tier: Opener, root: Path, tmp_path: Path
) -> None:
    close(open_tier())
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    lock = root / "kvtier.lock"
    lock.unlink()
    lock.symlink_to(target)
    message = f"{lock} is a symbolic link, which is not followed; remove it"
    with pytest.raises(StoreDamagedError, match=message):
        open_tier()
    (space,) = find_namespaces(root)
    with pytest.raises(ConfigError, match=message):
        holder_of(space.directory)
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("above", [False, True], ids=["the path", "a directory above"])
def test_a_symbolic_link_at_the_path_or_above_is_followed(
    open_tier: Opener, root: Path, tmp_path: Path, above: bool
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    root.symlink_to(disk)
    asked = root / "store" if above else root
    tier = open_tier(path=asked)
    fill(tier)
    close(tier)
    real = disk / "store" if above else disk
    assert (real / fingerprint("m").namespace() / "slots.bin").stat().st_size == 8 * SLOT
    assert root.is_symlink()
    for path in (asked, real):
        (space,) = find_namespaces(path)
        assert holder_of(space.directory) is None
        tier = open_tier(path=path)
        assert slots_of(tier) == list(range(8))
        with pytest.raises(StoreLockedError):  # by whichever name it is opened again
            open_tier(path=real if path == asked else asked)
        close(tier)


def test_a_symbolic_link_at_the_path_that_leads_nowhere_is_a_configuration_error(
    open_tier: Opener, root: Path, tmp_path: Path
) -> None:
    root.symlink_to(tmp_path / "unmounted")
    with pytest.raises(ConfigError, match=f"path {root} is not a directory"):
        open_tier()
    assert not (tmp_path / "unmounted").exists()


def test_a_symbolic_link_in_place_of_the_namespace_is_refused(
    open_tier: Opener, own: Path, tmp_path: Path
) -> None:
    close(open_tier())
    moved = own.rename(tmp_path / "moved")
    own.symlink_to(moved)
    with pytest.raises(StoreDamagedError, match="not a directory of its own"):
        open_tier()


def test_a_foreign_file_named_like_ours_is_left_alone(open_tier: Opener, own: Path) -> None:
    own.mkdir(parents=True)
    (own / "slots.bin").write_bytes(b"precious")
    with pytest.raises(StoreDamagedError, match=r"it has slots\.bin but no layout\.json"):
        open_tier()
    assert (own / "slots.bin").read_bytes() == b"precious"
    assert [path.name for path in own.iterdir()] == ["slots.bin"]


def test_other_slots_under_the_same_fingerprint_are_refused(open_tier: Opener) -> None:
    close(open_tier())
    with pytest.raises(StoreDamagedError, match="4096 bytes, this engine's 8192; move it away"):
        open_tier(slot_nbytes=8192)


def edit_layout(own: Path, **changes: Any) -> None:
    path = own / "layout.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"format": "tar"}, "format 'tar'"),
        ({"fingerprint": {"model": "m", "ranks": 2}}, "ranks is 2, this engine's 1"),
        ({"slot_nbytes": "many"}, "does not describe a kvtier store"),
    ],
)
def test_another_layout_in_our_place_is_refused(
    open_tier: Opener, own: Path, changes: dict[str, Any], message: str
) -> None:
    close(open_tier())
    edit_layout(own, **changes)
    with pytest.raises(StoreDamagedError, match=message):
        open_tier()


def test_a_layout_that_is_not_json_is_refused(open_tier: Opener, own: Path) -> None:
    close(open_tier())
    (own / "layout.json").write_bytes(b"\xff\xfe")
    with pytest.raises(StoreDamagedError, match=r"layout\.json"):
        open_tier()


def test_what_a_removal_cut_short_left_is_used_again(open_tier: Opener, own: Path) -> None:
    tier = open_tier()
    fill(tier)
    close(tier)
    (own / "slots.bin").unlink()
    assert slots_of(open_tier()) == []


def test_growing_keeps_what_is_there(open_tier: Opener, own: Path) -> None:
    tier = open_tier(slots=8)
    fill(tier)
    close(tier)
    tier = open_tier(slots=11)
    assert tier.capacity_slots == 11
    assert slots_of(tier) == list(range(8))
    assert (own / "slots.bin").stat().st_size == 11 * SLOT
    assert (own / "slots.bin").stat().st_blocks * 512 >= 11 * SLOT


def test_shrinking_drops_the_slots_beyond(open_tier: Opener, own: Path) -> None:
    tier = open_tier(slots=8)
    fill(tier)
    close(tier)
    tier = open_tier(slots=5)
    assert slots_of(tier) == list(range(5))
    assert (own / "slots.bin").stat().st_size == 5 * SLOT
    close(tier)
    assert slots_of(open_tier(slots=8)) == list(range(5))


def test_a_capacity_below_one_slot_is_a_configuration_error(open_tier: Opener) -> None:
    with pytest.raises(ConfigError, match=r"capacity of 4\.00 KiB is less than one slot"):
        open_tier(slots=1, slot_nbytes=8192)


def test_a_path_without_a_parent_is_a_configuration_error(
    open_tier: Opener, root: Path
) -> None:
    shutil.rmtree(root.parent)
    with pytest.raises(ConfigError, match="does not exist; create it, or mount the disk"):
        open_tier()


def test_a_path_that_is_a_file_is_a_configuration_error(open_tier: Opener, root: Path) -> None:
    root.write_text("")
    with pytest.raises(ConfigError, match="is not a directory"):
        open_tier()


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00garbage" * 4096)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 100)


def damage(*statements: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        connection = sqlite3.connect(path)
        for statement in statements:
            connection.execute(statement)
        connection.commit()
        connection.close()

    return edit


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(garbage, id="garbage"),
        pytest.param(cut_short, id="cut-short"),
        pytest.param(damage("PRAGMA user_version=99"), id="newer-version"),
        pytest.param(damage("PRAGMA application_id=1"), id="another-application"),
        pytest.param(damage("ALTER TABLE chunks ADD COLUMN x"), id="more-columns"),
        pytest.param(damage("DROP TABLE meta"), id="fewer-tables"),
        pytest.param(damage(f"UPDATE chunks SET last_use={2**63 - 1}"), id="runaway-clock"),
    ],
)
def test_a_damaged_index_costs_the_cache_and_not_the_start(
    open_tier: Opener,
    own: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], None],
) -> None:
    tier = open_tier()
    fill(tier)
    close(tier)
    for _ in range(2):
        spoil(own / "index.sqlite")
        caplog.clear()
        tier = open_tier()
        assert slots_of(tier) == []
        [warning] = warnings_in(caplog)
        assert "index.sqlite.damaged" in warning
        fill(tier)
        close(tier)
        assert [path.name for path in own.glob("*damaged*")] == ["index.sqlite.damaged"]
    assert slots_of(open_tier()) == list(range(8))


def test_values_of_another_type_are_no_chunk(open_tier: Opener, own: Path) -> None:
    tier = open_tier()
    fill(tier)
    close(tier)
    damage("UPDATE chunks SET checksum='x' WHERE slot=3")(own / "index.sqlite")
    tier = open_tier()
    sources = make_sources(KEYS, SLOT)
    result = asyncio.run(tier.read(KEYS, range(8), sources, why=Why.LOAD))
    expected = [Outcome.CORRUPT if slot == 3 else Outcome.DONE for slot in range(8)]
    assert list(result.outcomes) == expected


class TestWithoutChecksums:
    @pytest.fixture
    def open_unchecked(self, root: Path, pool: IoPool) -> Iterator[Opener]:
        opened: list[SlabTier] = []

        def open_unchecked() -> SlabTier:
            options = NvmeTierConfig(
                path=root, capacity_bytes=8 * SLOT, direct_io="off", checksum="off"
            )
            opened.append(SlabTier.open(options, TierContext(SLOT, fingerprint("m"), pool)))
            return opened[-1]

        yield open_unchecked
        for tier in opened:
            close(tier)

    def test_what_was_stored_with_checksums_is_not_trusted(
        self, open_tier: Opener, open_unchecked: Opener, caplog: pytest.LogCaptureFixture
    ) -> None:
        tier = open_tier()
        fill(tier)
        close(tier)
        assert slots_of(open_unchecked()) == []
        assert "written with checksum: xxh3" in warnings_in(caplog)[0]

    def test_what_was_stored_without_cannot_be_checked_later(
        self, open_tier: Opener, open_unchecked: Opener
    ) -> None:
        tier = open_unchecked()
        fill(tier)
        close(tier)
        assert slots_of(open_tier()) == []

    def test_a_machine_that_went_down_costs_the_cache(
        self, open_unchecked: Opener, own: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        tier = open_unchecked()
        fill(tier)
        close(tier)
        note = "INSERT OR REPLACE INTO meta VALUES ('boot', 'an earlier one')"
        damage(note)(own / "index.sqlite")
        assert slots_of(open_unchecked()) == []
        assert "the machine went down" in warnings_in(caplog)[0]
