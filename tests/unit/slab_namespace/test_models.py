"""Several models in one directory: they see nothing of each other and share the capacity."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import pytest
from typing_extensions import override

from kvtier.errors import CacheLockedError, ConfigError, TierUnavailableError
from kvtier.tiers.slab import opening
from kvtier.tiers.slab.index_reader import IndexReader
from kvtier.tiers.slab.inspect import StoredNamespace, find_namespaces
from kvtier.tiers.slab.maintain import hold
from kvtier.tiers.slab.namespace import FILES, INDEX, SLOTS
from tests.support.faulty_io import Fault, FaultyIo
from tests.unit.slab_locks import Clock, held
from tests.unit.slab_namespace.opening import (
    SLOT,
    Opener,
    close,
    edit_layout,
    fill,
    fingerprint,
    slots_of,
)
from tests.unit.warned import warnings_in

T = TypeVar("T")


def test_two_models_have_the_store_open_side_by_side(open_tier: Opener) -> None:
    first, second = (open_tier(model=model) for model in ("a", "b"))
    fill(first, 8)
    fill(second, 3)
    close(first)
    first = open_tier(model="a")
    assert slots_of(first) == list(range(8))
    close(second)
    second = open_tier(model="b")
    assert slots_of(second) == list(range(3))
    fill(first, 8)
    fill(second, 3)


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


def test_a_changed_flag_does_not_cost_a_cache_that_was_used_lately(
    open_tier: Opener, own: Path, root: Path
) -> None:
    before = open_tier(ranks=1)
    fill(before)
    close(before)
    with pytest.raises(ConfigError) as caught:
        open_tier(ranks=2, on_mismatch="refuse")
    found = str(caught.value)
    assert f"the cache of model m in {own} (32.0 KiB with 8 chunks, used " in found
    assert "another identity (ranks is 1 there and 2 here)" in found
    assert "set on_mismatch: remove" in found
    assert [path for path in root.iterdir() if path.is_dir()] == [own]
    assert len(slots_of(open_tier(ranks=1, on_mismatch="refuse"))) == 8


def test_a_cache_that_was_not_used_for_keep_for_is_removed_with_a_warning(
    open_tier: Opener, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = open_tier(ranks=1)
    fill(before)
    close(before)
    open_tier(ranks=2, on_mismatch="refuse", keep_for_s=1e-9)
    (warning,) = warnings_in(caplog)
    assert "with 8 chunks" in warning
    assert "ranks is 1 there and 2 here" in warning
    assert [path.parent.name for path in root.glob("*/slots.bin")] == [
        fingerprint("m", 2).namespace()
    ]


def test_a_cache_without_chunks_is_no_reason_not_to_start(
    open_tier: Opener, root: Path
) -> None:
    close(open_tier(model="mistyped"))
    open_tier(on_mismatch="refuse")
    assert [path.parent.name for path in root.glob("*/slots.bin")] == [
        fingerprint("m").namespace()
    ]


def test_a_cache_whose_chunks_cannot_be_counted_is_protected(
    open_tier: Opener, own: Path
) -> None:
    before = open_tier()
    fill(before)
    close(before)
    (own / INDEX).write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="is of another identity"):
        open_tier(model="another", on_mismatch="refuse")


def test_a_second_engine_in_the_directory_is_warned_of_the_first(
    open_tier: Opener, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(open_tier(model="first"))
    open_tier(model="second", on_mismatch="refuse")
    (warning,) = warnings_in(caplog)
    assert f"pid {os.getpid()} on host " in warning
    assert f"has {root / fingerprint('first').namespace()} open for model first" in warning
    assert "together they take 32.0 KiB and 32.0 KiB" in warning
    assert "give each engine a path of its own" in warning


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


class WatchfulIo(FaultyIo):
    """Looks after every call how much the slots take that have a name, or somebody reads.

    Args:
        root: The store.
        readers: Open files that may lose their names.
    """

    def __init__(self, root: Path, readers: Sequence[BinaryIO]) -> None:
        super().__init__()
        self._root = root
        self._readers = readers
        self.most_nbytes = self.taken_nbytes()

    def taken_nbytes(self) -> int:
        found = [path.stat() for path in self._root.glob("*/slots.bin")]
        found += [os.fstat(reader.fileno()) for reader in self._readers]
        return sum({status.st_ino: status.st_blocks * 512 for status in found}.values())

    @override
    def run(
        self, call: str, action: Callable[[], T], *, undo: Callable[[T], None] | None = None
    ) -> T:
        try:
            return super().run(call, action, undo=undo)
        finally:
            self.most_nbytes = max(self.most_nbytes, self.taken_nbytes())


@pytest.mark.parametrize(
    "change",
    [
        {"model": "another"},
        {"model": "another", "slots": 7},
        {"slots": 7},
        {"slots": 16},
        {"model": "another", "slots": 16},
        {"model": "another", "slot_nbytes": 3 * SLOT},
        {"slots": 1, "durability": "power"},
    ],
    ids=str,
)
def test_at_no_moment_of_a_start_do_the_slots_take_more_than_they_may(
    open_tier: Opener, root: Path, change: dict[str, Any]
) -> None:
    tier = open_tier()
    fill(tier)
    close(tier)
    (slots,) = root.glob("*/slots.bin")
    with slots.open("rb") as reader:
        io = WatchfulIo(root, [reader])
        allowed_nbytes = change.get("slots", 8) * SLOT
        before_nbytes = io.most_nbytes
        close(open_tier(**change, io=io))
        assert io.most_nbytes <= max(allowed_nbytes, before_nbytes)
        assert 0 < io.taken_nbytes() <= allowed_nbytes


def test_a_model_in_use_is_not_removed_for_another(open_tier: Opener) -> None:
    old = open_tier(model="old")
    fill(old)
    open_tier(model="new")
    close(old)
    assert slots_of(open_tier(model="old")) == list(range(8))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of an engine that waits for room."""
    clock = Clock()
    monkeypatch.setattr(opening, "PATIENCE", clock.patience)
    return clock


@contextlib.contextmanager
def in_hands_of_dead_engine(space: StoredNamespace) -> Iterator[None]:
    """Hold its lock as the I/O of an engine does that died."""
    holder = f"pid {2**22 + 1} on host {os.uname().nodename}\n"  # no such pid
    (space.directory / "lock").write_text(holder)
    with held(space.directory):
        yield


@pytest.mark.parametrize(
    "keep",
    [lambda space: hold(space, "stop it"), in_hands_of_dead_engine],
    ids=["kvtier cache", "an engine that died"],
)
def test_a_start_waits_for_room_that_no_engine_uses_and_stays_within_capacity(
    open_tier: Opener,
    root: Path,
    clock: Clock,
    keep: Callable[[StoredNamespace], contextlib.AbstractContextManager[None]],
) -> None:
    close(open_tier(model="old"))
    (space,) = find_namespaces(root)
    with contextlib.ExitStack() as other:
        other.enter_context(keep(space))
        clock.alarms.append((103, other))
        open_tier(model="new")
    assert 103 <= clock.now_s < 104
    assert [path.parent.name for path in root.glob("*/slots.bin")] == [
        fingerprint("new").namespace()
    ]


def test_while_an_engine_waits_for_room_a_tool_can_go_on_in_the_store(
    open_tier: Opener, root: Path, clock: Clock
) -> None:
    close(open_tier(model="old"))
    (space,) = find_namespaces(root)
    with contextlib.ExitStack() as tool, IndexReader(space) as reader:
        tool.enter_context(hold(space, "stop it"))
        tool.callback(lambda: reader.entries("stored", -1))
        clock.alarms.append((103, tool))
        open_tier(model="new")
    assert 103 <= clock.now_s < 104


def test_a_start_that_a_tool_delays_too_long_fails_and_removes_nothing(
    open_tier: Opener, root: Path, clock: Clock
) -> None:
    close(open_tier(model="old"))
    (space,) = find_namespaces(root)
    problem = (
        rf"{space.directory} is in use by pid {os.getpid()} on host \S+ since \S+, for kvtier "
        "cache; the capacity is not enough beside it: let that finish, or end it"
    )
    with hold(space, "stop it"), pytest.raises(CacheLockedError, match=problem):
        open_tier(model="new")
    assert 110 <= clock.now_s < 111
    assert [path.parent for path in root.glob("*/slots.bin")] == [space.directory]
    open_tier(model="new")


def test_an_engine_that_may_run_in_another_container_is_let_be_in_the_end(
    open_tier: Opener, root: Path, clock: Clock
) -> None:
    close(open_tier(model="old", ranks=2))
    (space,) = find_namespaces(root)
    with in_hands_of_dead_engine(space):
        open_tier(model="old")
    assert 110 <= clock.now_s < 111
    assert len(list(root.glob("*/slots.bin"))) == 2


def test_a_tool_is_not_waited_for_where_there_is_room_beside_it(
    open_tier: Opener, root: Path, clock: Clock
) -> None:
    close(open_tier(model="old", slots=3))
    (space,) = find_namespaces(root)
    with hold(space, "stop it"):
        open_tier(model="new", slots=9, slot_nbytes=5 * SLOT)  # eight pages in all
    assert clock.now_s == 100


def test_a_tool_that_has_this_models_store_is_named_with_a_remedy(
    open_tier: Opener, root: Path
) -> None:
    close(open_tier())
    (space,) = find_namespaces(root)
    with (
        hold(space, "stop it"),
        pytest.raises(CacheLockedError, match="for kvtier cache; let it finish, or end it"),
    ):
        open_tier()


def test_an_engine_that_starts_alone_removes_the_cache_that_ran_beside_it(
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


@pytest.fixture
def future(open_tier: Opener, root: Path) -> Path:
    """What a later version of kvtier made, beside the cache of a model called old."""
    close(open_tier(model="old", slots=3))
    close(open_tier(model="future", slots=15, slot_nbytes=8 * SLOT))  # one slot
    directory = root / fingerprint("future").namespace()
    edit_layout(directory, version=2)
    return directory


def test_a_cache_of_a_later_version_counts_and_stays(
    open_tier: Opener, root: Path, future: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_tier(model="new", slots=24, slot_nbytes=15 * SLOT)  # one slot; with all of them 26
    assert (future / "slots.bin").stat().st_size == 8 * SLOT
    assert sum(path.stat().st_size for path in root.glob("*/slots.bin")) <= 24 * SLOT
    (removed,) = warnings_in(caplog)
    assert "removing the cache of model old" in removed


def test_a_start_that_would_exceed_the_capacity_beside_a_later_version_is_refused(
    open_tier: Opener, root: Path, future: Path
) -> None:
    files = sorted(root.glob("*/slots.bin"))
    with pytest.raises(ConfigError) as caught:
        open_tier(model="new", slots=24)
    assert f"{future} (32.0 KiB) was made by another version of kvtier" in str(caught.value)
    assert "the capacity of 96.0 KiB is not enough beside it; remove it" in str(caught.value)
    assert sorted(root.glob("*/slots.bin")) == files


@pytest.mark.parametrize(
    "text", ["", "{}", "[" * 200_000, None], ids=["empty", "strange", "deep", "gone"]
)
def test_a_namespace_without_a_readable_layout_causes_a_warning(
    open_tier: Opener, root: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    close(open_tier(model="old"))
    layout = root / fingerprint("old").namespace() / "layout.json"
    layout.unlink()
    if text is not None:
        layout.write_text(text)
    open_tier(model="new")
    (warning,) = warnings_in(caplog)
    assert f"{layout.parent} looks like a cache of kvtier's, but it has slots" in warning
    assert (layout.parent / "slots.bin").stat().st_size == 8 * SLOT


def test_a_cache_that_this_user_cannot_read_is_a_warning(
    open_tier: Opener,
    root: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    close(open_tier(model="old"))
    old = root / fingerprint("old").namespace()
    look = Path.iterdir

    def refuse_in_old(path: Path) -> Iterator[Path]:
        if path == old:
            raise PermissionError(13, "Permission denied")
        return look(path)

    monkeypatch.setattr(Path, "iterdir", refuse_in_old)
    open_tier(model="new")
    (warning,) = warnings_in(caplog)
    assert (
        f"{old} looks like a cache of kvtier's, but this user may not look into it" in warning
    )


def test_a_removed_cache_with_a_reader_frees_its_room_when_the_reader_ends(
    open_tier: Opener, root: Path
) -> None:
    tier = open_tier(model="old")
    fill(tier)
    close(tier)
    (slots,) = root.glob("*/slots.bin")
    with slots.open("rb") as reader:
        assert os.fstat(reader.fileno()).st_blocks
        open_tier(model="new")
        status = os.fstat(reader.fileno())
        assert (status.st_nlink, status.st_blocks) == (0, 0)


def test_slots_that_somebody_gave_another_name_keep_what_they_hold(
    open_tier: Opener, root: Path, tmp_path: Path
) -> None:
    tier = open_tier(model="old")
    fill(tier)
    close(tier)
    (slots,) = root.glob("*/slots.bin")
    held = slots.read_bytes()
    kept = tmp_path / "kept.bin"
    kept.hardlink_to(slots)
    open_tier(model="new")
    assert not slots.exists()
    assert kept.read_bytes() == held


def test_an_open_cache_of_a_later_version_counts_against_its_own_engine(
    open_tier: Opener, root: Path, future: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with held(future):
        open_tier(model="new", slots=24, slot_nbytes=5 * SLOT)
    (warning,) = warnings_in(caplog)
    assert f"has {future} open" in warning
    assert (root / fingerprint("old").namespace()).is_dir()


def test_remains_of_another_models_cache_are_removed_at_the_next_start(
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


def test_a_removal_that_cannot_give_room_back_is_ended_by_the_next_start(
    open_tier: Opener, root: Path
) -> None:
    tier = open_tier(model="old")
    fill(tier)
    close(tier)
    io = FaultyIo()
    io.strike("truncate", 1, Fault(errno.EIO))  # the first is of the lock
    with pytest.raises(TierUnavailableError, match="check the disk"):
        open_tier(model="new", io=io)
    open_tier(model="new")
    assert [path.parent.name for path in root.glob("*/slots.bin")] == [
        fingerprint("new").namespace()
    ]


@pytest.mark.parametrize("done", range(len(FILES)))
def test_wherever_a_removal_is_cut_short_the_next_start_ends_it(
    open_tier: Opener, root: Path, done: int
) -> None:
    tier = open_tier(model="old")
    fill(tier)
    close(tier)
    io = FaultyIo()
    io.strike("unlink", done, Fault(errno.EIO, lasting=True))
    with pytest.raises(TierUnavailableError, match="check the disk"):
        open_tier(model="new", io=io)
    open_tier(model="new")
    kept = [path.parent.name for path in root.rglob("*") if path.name in {SLOTS, INDEX}]
    assert {*kept} == {fingerprint("new").namespace()}, "the rest would count for nobody"


def test_a_start_that_cannot_sync_its_directories_is_refused_before_anything_is_dropped(
    open_tier: Opener,
) -> None:
    tier = open_tier()
    fill(tier)
    close(tier)
    io = FaultyIo()
    io.fail("sync", errno.EIO)
    with pytest.raises(TierUnavailableError, match="check the disk"):
        open_tier(slots=4, durability="power", io=io)
    assert slots_of(open_tier()) == list(range(8))
