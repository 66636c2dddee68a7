"""The index: its version, its times and hits, and its removal log."""

from __future__ import annotations

import asyncio
import errno
import random
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from typing_extensions import override

from kvtier.errors import ConfigError
from kvtier.keys import ADAPTER_NBYTES, GROUP_NBYTES, make_key, short_key
from kvtier.os.block_io import BlockIo
from kvtier.tiers.slab import group_commit, index, schema
from kvtier.tiers.slab.group_commit import GroupCommit
from kvtier.tiers.slab.index import Change, IndexDatabase, Row
from kvtier.tiers.slab.removals import MarkPattern, RemovalReason, pack_marks
from kvtier.tiers.slab.schema import REMOVAL_LOG_NBYTES
from kvtier.tiers.slab.stored_rows import KeyMarks, hash_keys, load_rows, mark_keys
from tests.unit.stores import KEYS, SLOTS, Store


def rows_of(slots: Sequence[int], *, generation: int = 0) -> dict[int, Row | None]:
    return {slot: (slot, KEYS[0][:-2] + slot.to_bytes(2), 0, generation, 0) for slot in slots}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[IndexDatabase]:
    path = tmp_path / "index.sqlite"
    database = IndexDatabase.open(path, BlockIo(), durability="process")
    yield database
    database.close()


def log_in(directory: Path) -> list[KeyMarks]:
    """Return the marks of each row of the removal log, oldest first."""
    connection = sqlite3.connect(directory / "index.sqlite")
    rows = connection.execute("SELECT key_marks FROM removals ORDER BY end").fetchall()
    connection.close()
    return [np.frombuffer(packed, dtype="<u8") for (packed,) in rows]


async def stopped(group: GroupCommit) -> None:
    await asyncio.get_running_loop().run_in_executor(None, group.stop)


class Recorder(IndexDatabase):
    """Records the changes to commit."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._log_path = Path("/dev/null")

    def apply(self, change: Change) -> None:
        self.changes.append(change)


class NotingIo(BlockIo):
    """Notes the connections that it opens."""

    def __init__(self) -> None:
        super().__init__()
        self.connections: list[sqlite3.Connection] = []

    @override
    def connect(self, path: Path) -> sqlite3.Connection:
        self.connections.append(super().connect(path))
        return self.connections[-1]


class TestLoading:
    @pytest.mark.parametrize(
        "keys",
        [
            [b"a" * 36, b"b" * 36, b"c" * 36],
            [b"a" * 36, b"b" * 4, b"c" * 36],
            [b"a" * 8, b"bb" * 8, b"ccc" * 8],
            [b"\0\0\0\0\0", b"a\0\0\0\0", b"\0a\0\0\0"],
            [],
        ],
    )
    def test_keys_of_any_length_come_back(
        self, database: IndexDatabase, monkeypatch: pytest.MonkeyPatch, keys: list[bytes]
    ) -> None:
        monkeypatch.setattr(index, "_SLOTS_PER_STEP", 2)  # the last step has one row
        rows: dict[int, Row | None] = {
            slot: (slot, key, slot + 7, slot, slot) for slot, key in enumerate(keys, start=1)
        }
        database.apply(Change(rows=rows))
        stored = load_rows(database, 5)
        assert list(stored) == [(key, slot) for slot, key in enumerate(keys, start=1)]
        assert stored.key_hashes.tolist() == hash_keys(keys).tolist()
        assert stored.key_marks.tolist() == mark_keys(keys).tolist()

    def test_rows_beyond_are_dropped_however_many_there_are(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(index, "_SLOTS_PER_STEP", 4)
        io = NotingIo()
        database = IndexDatabase.open(tmp_path / "index.sqlite", io, durability="process")
        # What SQLite makes of a million keys at once is longer than it can hold; so is this.
        io.connections[-1].setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1000)
        rows = rows_of(range(30))
        database.apply(Change(rows=rows))
        assert len(load_rows(database, 3).keys) == 3
        dropped = [row[1] for slot, row in sorted(rows.items()) if slot >= 3 and row]
        (marks,) = log_in(tmp_path)
        assert marks.tolist() == mark_keys(dropped).tolist()
        database.close()


class TestVersions:
    def test_an_index_of_another_version_is_refused(self, store: Store) -> None:
        store.filled().sql("PRAGMA user_version=9")
        with pytest.raises(
            ConfigError,
            match=r"index\.sqlite: it has version 9, and this kvtier reads 1; start the kvtier "
            r"that wrote it, or set on_mismatch: remove, which starts with an empty cache$",
        ):
            store.start()
        store.sql("PRAGMA user_version=1")
        assert store.start() == KEYS[:SLOTS]

    def test_an_index_of_another_version_is_set_aside_where_that_is_allowed(
        self, store: Store
    ) -> None:
        store.filled().sql("PRAGMA user_version=9")
        assert store.start(on_mismatch="remove") == []
        store.stop()
        assert (store.directory / "index.sqlite.damaged").exists()
        assert store.sql("SELECT reason, key_marks FROM removals") == [("damaged", b"")]

    def test_an_index_with_other_columns_is_set_aside(self, store: Store) -> None:
        store.filled().sql("ALTER TABLE removals ADD COLUMN marked")
        assert store.start() == []
        store.fill()

    def test_a_removal_log_without_room_to_go_on_is_damage(self, store: Store) -> None:
        store.filled().sql("INSERT INTO removals VALUES (?, 1, 'reset', x'')", 2**63 - 1)
        assert store.start() == []
        store.fill()


class TestUses:
    def test_every_touch_is_a_hit_and_a_new_chunk_starts_from_none(self, store: Store) -> None:
        store.start()
        store.fill()
        for _ in range(3):
            store.tier.touch([1, 2])
        store.tier.touch([2])
        store.put([KEYS[SLOTS]], [1])
        store.tier.touch([1])
        store.stop()
        assert store.sql("SELECT hits FROM chunks WHERE slot IN (1, 2, 3)") == [
            (1,),
            (4,),
            (0,),
        ]

    def test_hits_add_up_over_restarts(self, store: Store) -> None:
        store.filled()
        for _ in range(2):
            store.start()
            store.tier.touch([5])
            store.stop()
        assert store.sql("SELECT hits FROM chunks WHERE slot = 5") == [(2,)]


class TestMarks:
    def test_a_key_mark_is_the_first_eight_bytes_and_the_group(self) -> None:
        keys = [make_key(bytes(range(1, 33)), 0), make_key(bytes(range(1, 33)), 3)]
        assert mark_keys(keys).tolist() == [0x0102030405060708, 0x0102030705060708]

    @pytest.mark.parametrize("other", [b"", b"abc", bytes(7), bytes(40)])
    def test_keys_of_unlike_lengths_have_the_marks_they_have_alone(self, other: bytes) -> None:
        keys = [make_key(other, 5), *KEYS[:3]]
        alone = [mark_keys([key]).tolist()[0] for key in keys]
        assert mark_keys(keys).tolist() == alone
        assert mark_keys(keys[::-1]).tolist() == alone[::-1]
        for some in (keys, KEYS):
            assert pack_marks(some) == mark_keys(some).astype("<u8").tobytes()

    @pytest.mark.parametrize("count", range(8, 17))
    @pytest.mark.parametrize("group", [0, 7, 63])
    def test_a_pattern_means_the_keys_that_begin_so_and_no_other(
        self, count: int, group: int
    ) -> None:
        keys = [make_key(random.Random(seed).randbytes(32), group) for seed in range(500)]
        marks = mark_keys(keys).tolist()
        digits = keys[123].hex()[:count]
        for asked in (group, None):
            pattern = MarkPattern(digits, asked)
            assert pattern.matching(marks) == [marks[123]]
            assert pattern.short_of(marks[123]) == short_key(keys[123])
        assert not MarkPattern(digits, group + 1).matching(marks)


class TestRemovalLog:
    def test_the_removal_log_keeps_the_newest_and_stays_within_its_bytes(
        self, database: IndexDatabase, tmp_path: Path
    ) -> None:
        batch = np.arange(100_000, dtype=np.uint64)
        for number in range(15):
            marks = (batch + np.uint64(number * 100_000)).tobytes()
            database.log_removals(RemovalReason.EVICTED, marks)
        kept = np.concatenate(log_in(tmp_path))
        assert REMOVAL_LOG_NBYTES < kept.nbytes <= REMOVAL_LOG_NBYTES + batch.nbytes
        assert kept[-1] == 1_499_999
        assert (np.diff(kept) == 1).all()

    def test_more_than_it_holds_at_once_is_cut(
        self, database: IndexDatabase, tmp_path: Path
    ) -> None:
        marks = np.arange(2_000_000, dtype=np.uint64).tobytes()
        database.log_removals(RemovalReason.RESET, marks)
        (kept,) = log_in(tmp_path)
        assert (kept.nbytes <= REMOVAL_LOG_NBYTES, kept[-1]) == (True, 1_999_999)
        database.log_removals(RemovalReason.EVICTED, pack_marks(KEYS[:1]))
        assert [len(row) for row in log_in(tmp_path)] == [len(kept), 1]
        database.log_removals(RemovalReason.EVICTED, kept.tobytes())
        assert [len(row) for row in log_in(tmp_path)] == [len(kept)]

    def test_a_chunk_written_again_in_its_place_has_not_left(self, store: Store) -> None:
        store.filled()
        store.start()
        store.fill()
        store.stop()
        assert store.sql("SELECT * FROM removals") == []

    def test_one_commit_has_one_row_per_reason(self, store: Store) -> None:
        store.start()
        store.fill()
        # The first note goes at once; what follows within the second goes together at the end.
        store.put(KEYS[SLOTS : SLOTS + 4], range(4))
        store.put(KEYS[SLOTS + 4 : SLOTS + 8], range(4, 8))
        store.tier.forget([9, 10])
        store.stop()
        rows = store.sql("SELECT reason, length(key_marks) / 8 FROM removals ORDER BY end")
        left = {
            reason: sum(n for what, n in rows if what == reason)
            for reason in ("evicted", "corrupt")
        }
        assert left == {"evicted": 8, "corrupt": 2}
        assert len(rows) <= 5


class TestLog:
    def test_a_log_is_cut_when_its_reader_has_ended(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(index, "_LONGEST_LOG_NBYTES", 1 << 16)
        path = tmp_path / "index.sqlite"
        database = IndexDatabase.open(path, BlockIo(), durability="process")
        reader = sqlite3.connect(path, isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM chunks").fetchall()
        for generation in range(100):
            database.apply(Change(rows=rows_of(range(1000), generation=generation)))
        assert database.log_nbytes > 5 << 20, "an old state is being read"
        reader.close()
        for generation in (100, 101):  # one folds the log, the next one begins it anew
            database.apply(Change(rows=rows_of(range(100), generation=generation)))
        assert database.log_nbytes <= 1 << 16
        database.close()

    def test_a_disk_that_does_not_say_how_long_it_is_fails_no_commit(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        path = tmp_path / "index.sqlite"
        database = IndexDatabase.open(path, BlockIo(), durability="process")

        def fail(path: Path) -> None:
            raise OSError(errno.EIO, "Input/output error", str(path))

        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", fail)
            assert database.log_nbytes == 0
        database.close()

    async def test_a_growing_log_is_reported_once(
        self,
        database: IndexDatabase,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(group_commit, "_LONG_LOG_NBYTES", 1)
        group = GroupCommit(database, name="nvme", clock=0)
        for slot in range(3):
            await group.put([slot], [KEYS[slot]], [0])
        await stopped(group)
        (said,) = [record.getMessage() for record in caplog.records]
        assert "the index's log has grown to" in said


def test_a_due_clear_precedes_the_next_change(
    database: IndexDatabase,
) -> None:
    database.apply(Change(rows=rows_of([0, 1])))
    database.call_later(database.clear)
    database.apply(Change(rows=rows_of([1, 2])))
    assert sorted(load_rows(database, SLOTS).slots.tolist()) == [1, 2]


def test_its_room_is_enough_for_keys_with_an_adapter_in_any_order(tmp_path: Path) -> None:
    chance, slots = random.Random(7), 20_000
    runs = [range(first, min(first + 64, slots)) for first in range(0, slots, 64)]
    chance.shuffle(runs)
    path = tmp_path / "index.sqlite"
    database = IndexDatabase.open(path, BlockIo(), durability="process")
    for late, run in enumerate(runs, start=10**9):
        keys = {slot: chance.randbytes(32 + ADAPTER_NBYTES + GROUP_NBYTES) for slot in run}
        rows = {
            slot: (slot, key, chance.getrandbits(62), late, late) for slot, key in keys.items()
        }
        database.apply(Change(rows={**rows}))
    database.close()
    assert path.stat().st_size <= slots * schema._ROW_NBYTES


class Gated(Recorder):
    """Holds its first commit until ``gate`` is open, and may fail it then."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self.began, self.gate = threading.Event(), threading.Event()
        self._fails = fails

    @override
    def apply(self, change: Change) -> None:
        super().apply(change)
        if len(self.changes) > 1:
            return
        self.began.set()
        assert self.gate.wait(10)
        if self._fails:
            raise sqlite3.OperationalError("database or disk is full")


class TestWhatWaitsForACommit:
    """What comes while another commit is under way, and may undo some of it."""

    async def after_the_first(
        self, first: Sequence[int], *asked: str, fails: bool = False
    ) -> Change:
        """Delete the rows of slots ``first``, then do what is ``asked``; return what follows.

        Args:
            first: Slots.
            *asked: "reset", or the slot of a new row.
            fails: Whether the deletion fails when all of that waits.
        """
        database = Gated(fails=fails)
        group = GroupCommit(database, name="test", clock=1)
        group.delete_nowait(first)
        await asyncio.get_running_loop().run_in_executor(None, database.began.wait, 10)
        async with asyncio.TaskGroup() as tasks:
            for what in asked:
                if what == "reset":
                    tasks.create_task(group.clear(after_reset=True))
                else:
                    tasks.create_task(group.put([int(what)], [KEYS[int(what)]], [7]))
                await asyncio.sleep(0)  # until it waits
            database.gate.set()
        await stopped(group)
        return database.changes[1]

    async def test_a_reset_takes_along_the_rows_that_came_before_it(self) -> None:
        change = await self.after_the_first([9], "0", "reset", "1")
        assert (change.clear, change.after_reset, list(change.rows)) == (True, True, [1])

    async def test_a_failed_deletion_is_tried_again_unless_the_row_was_replaced(
        self,
    ) -> None:
        change = await self.after_the_first([0, 5], "0", fails=True)
        assert change.rows.keys() == {0, 5}
        assert change.rows[0] is not None
        assert change.rows[5] is None

    async def test_a_reset_that_waits_is_not_undone_by_a_commit_that_fails(self) -> None:
        change = await self.after_the_first([5], "reset", "1", fails=True)
        assert (change.clear, change.after_reset, list(change.rows)) == (True, True, [1])


class TestGroupCommit:
    @pytest.fixture
    def database(self) -> Recorder:
        return Recorder()

    @pytest.fixture
    async def group(self, database: Recorder, monkeypatch: pytest.MonkeyPatch) -> GroupCommit:
        """A group whose next records are due in an hour, after some records just now."""
        monkeypatch.setattr(group_commit, "_RECORDS_INTERVAL_S", 3600.0)
        group = GroupCommit(database, name="test", clock=1)
        group.log_removal_nowait(
            RemovalReason.EVICTED, pack_marks(KEYS[:1])
        )  # the first goes at once
        return group

    async def test_notes_wait_for_their_second_and_rows_do_not(
        self, database: Recorder, group: GroupCommit
    ) -> None:
        await group.put([0], [KEYS[0]], [7])
        group.use_nowait([0])
        group.log_removal_nowait(RemovalReason.EVICTED, pack_marks(KEYS[1:2]))
        await group.put([1], [KEYS[1]], [7])
        assert not database.changes[-1].records
        await stopped(group)
        last = database.changes[-1].records
        assert (dict(last.hits), list(last.removals)) == ({0: 1}, [RemovalReason.EVICTED])

    async def test_a_use_of_a_chunk_that_left_is_dropped(
        self, database: Recorder, group: GroupCommit
    ) -> None:
        await group.put([0, 1, 2], KEYS[:3], [7, 7, 7])
        group.use_nowait([0, 1, 2])
        await group.put([0], [KEYS[3]], [7])
        group.delete_nowait([1])
        group.use_nowait([0])
        await stopped(group)
        assert database.changes[-1].records.hits == {0: 1, 2: 1}
