"""The index: its versions, its times and hits, and its trail."""

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

from kvtier.keys import ADAPTER_NBYTES, GROUP_NBYTES, make_key, short_key
from kvtier.tiers.slab import group_commit, index, maintain
from kvtier.tiers.slab.change import Change, Row
from kvtier.tiers.slab.direct_io import BlockIo
from kvtier.tiers.slab.group_commit import GroupCommit
from kvtier.tiers.slab.index import IndexDatabase, IndexSpec, hash_keys
from kvtier.tiers.slab.inspect import IndexReader, find_namespaces
from kvtier.tiers.slab.schema import bring_up
from kvtier.tiers.slab.trail import TRAIL_NBYTES, KeyMarks, MarkPattern, Reason, mark_keys
from tests.unit.stores import KEYS, SLOTS, Store


def rows_of(slots: Sequence[int], *, generation: int = 0) -> dict[int, Row | None]:
    return {slot: (slot, KEYS[0][:-2] + slot.to_bytes(2), 0, generation, 0) for slot in slots}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[IndexDatabase]:
    spec = IndexSpec(tmp_path / "index.sqlite", "process")
    database = IndexDatabase.open(spec, BlockIo())
    yield database
    database.close()


def trail_in(directory: Path) -> list[KeyMarks]:
    """Return the marks of each row of the trail, oldest first."""
    connection = sqlite3.connect(directory / "index.sqlite")
    rows = connection.execute("SELECT key_hashes FROM departures ORDER BY end").fetchall()
    connection.close()
    return [np.frombuffer(packed, dtype="<u8") for (packed,) in rows]


async def stopped(group: GroupCommit) -> None:
    await asyncio.get_running_loop().run_in_executor(None, group.stop)


class Recorder(IndexDatabase):
    """Keeps what it is told to commit."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._log_path = Path("/dev/null")

    def apply(self, change: Change) -> None:
        self.changes.append(change)


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
        stored = database.load(5)
        assert list(stored) == [(key, slot) for slot, key in enumerate(keys, start=1)]
        assert stored.key_hashes.tolist() == hash_keys(keys).tolist()
        assert stored.key_marks.tolist() == mark_keys(keys).tolist()

    def test_rows_beyond_are_dropped_however_many_there_are(
        self, database: IndexDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(index, "_SLOTS_PER_STEP", 4)
        # What SQLite makes of a million keys at once is longer than it can hold; so is this.
        database._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1000)
        rows = rows_of(range(30))
        database.apply(Change(rows=rows))
        assert len(database.load(3).keys) == 3
        dropped = [row[1] for slot, row in sorted(rows.items()) if slot >= 3 and row]
        (marks,) = trail_in(tmp_path)
        assert marks.tolist() == mark_keys(dropped).tolist()


class TestVersions:
    def test_version_1_is_brought_up_in_place_and_keeps_all_chunks(self, store: Store) -> None:
        store.filled().become_version_1()
        inode = store.index.stat().st_ino
        assert store.start() == KEYS[:SLOTS]
        store.tier.touch([3])
        store.put([KEYS[SLOTS]], [0])
        store.stop()
        assert store.index.stat().st_ino == inode
        assert store.sql("PRAGMA user_version") == [(3,)]
        rows = store.sql("SELECT stored_at > 0, used_at > 0, hits FROM chunks ORDER BY slot")
        assert rows == [(1, 1, 0), (0, 0, 0), (0, 0, 0), (0, 1, 1), *[(0, 0, 0)] * 12]
        assert store.start() == [KEYS[1], KEYS[2], *KEYS[4:SLOTS], KEYS[3], KEYS[SLOTS]]

    def test_an_upgrade_cut_short_leaves_version_1(self, store: Store) -> None:
        store.filled().become_version_1()
        store.sql("CREATE TABLE departures(x)")  # the upgrade's last statement will fail
        store.start()
        store.stop()
        aside = sqlite3.connect(store.directory / "index.sqlite.damaged")
        columns = [row[1] for row in aside.execute("PRAGMA table_info(chunks)")]
        version = aside.execute("PRAGMA user_version").fetchone()
        aside.close()
        assert (columns[-1], version) == ("last_use", (1,))

    def test_version_2_is_brought_up_in_place_and_keeps_chunks_uses_and_trail(
        self, store: Store
    ) -> None:
        store.start()
        store.fill()
        store.tier.touch([3])
        store.stop()
        store.become_version_2(evicted=[KEYS[40]])
        kept = "SELECT * FROM chunks ORDER BY slot"
        before, inode = store.sql(kept), store.index.stat().st_ino
        assert set(store.start()) == set(KEYS[:SLOTS])
        store.put([KEYS[SLOTS]], [0])
        store.stop()
        assert (store.index.stat().st_ino, store.sql(kept)[1:]) == (inode, before[1:])
        assert store.sql("PRAGMA user_version") == [(3,)]
        assert store.sql(
            "SELECT end, reason, key_hashes, marked FROM departures ORDER BY end"
        ) == [
            (1000, "evicted", hash_keys([KEYS[40]]).tobytes(), 0),
            (1040, "evicted", mark_keys([KEYS[0]]).tobytes(), 1),
        ]

    def test_who_reads_while_an_engine_brings_version_2_up_reads_on(self, store: Store) -> None:
        store.filled().become_version_2(evicted=[KEYS[40]])
        (space,) = find_namespaces(store.root)
        with maintain.hold(space, "stop that engine"), IndexReader(space) as reader:
            before = (reader.totals(), list(reader.departures()))
            connection = sqlite3.connect(store.index)
            bring_up(connection)
            connection.close()
            assert reader.live
            assert (reader.totals(), list(reader.departures())) == before

    def test_an_upgrade_of_version_2_cut_short_costs_the_cache_and_not_the_start(
        self, store: Store
    ) -> None:
        store.filled().become_version_2()
        store.sql("ALTER TABLE departures ADD COLUMN marked")  # but the version says 2
        assert store.start() == []
        store.fill()

    def test_a_version_nobody_knows_is_set_aside(self, store: Store) -> None:
        store.filled().sql("PRAGMA user_version=4")
        assert store.start() == []
        store.stop()
        assert (store.directory / "index.sqlite.damaged").exists()
        assert store.sql("SELECT reason, key_hashes FROM departures") == [("damaged", b"")]

    def test_a_trail_without_room_to_go_on_is_damage(self, store: Store) -> None:
        store.filled().sql("INSERT INTO departures VALUES (?, 1, 'reset', x'', 1)", 2**63 - 1)
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
    def test_a_mark_is_the_first_eight_bytes_and_the_group(self) -> None:
        keys = [make_key(bytes(range(1, 33)), 0), make_key(bytes(range(1, 33)), 3)]
        assert mark_keys(keys).tolist() == [0x0102030405060708, 0x0102030705060708]

    @pytest.mark.parametrize("other", [b"", b"abc", bytes(7), bytes(40)])
    def test_keys_of_unlike_lengths_have_the_marks_they_have_alone(self, other: bytes) -> None:
        keys = [make_key(other, 5), *KEYS[:3]]
        alone = [mark_keys([key]).tolist()[0] for key in keys]
        assert mark_keys(keys).tolist() == alone
        assert mark_keys(keys[::-1]).tolist() == alone[::-1]

    @pytest.mark.parametrize("count", range(8, 17))
    @pytest.mark.parametrize("group", [0, 7, 63])
    def test_a_pattern_means_the_keys_that_begin_so_and_no_other(
        self, count: int, group: int
    ) -> None:
        keys = [make_key(random.Random(seed).randbytes(32), group) for seed in range(500)]
        marks = mark_keys(keys)
        digits = keys[123].hex()[:count]
        for asked in (group, None):
            pattern = MarkPattern(digits, asked)
            assert np.flatnonzero(pattern.matches(marks)).tolist() == [123]
            assert pattern.short_of(int(marks[123])) == short_key(keys[123])
        assert not MarkPattern(digits, group + 1).matches(marks).any()


class TestTrail:
    def test_it_keeps_the_newest_and_stays_within_its_bytes(
        self, database: IndexDatabase, tmp_path: Path
    ) -> None:
        batch = np.arange(100_000, dtype=np.uint64)
        for number in range(15):
            database.note_departures(Reason.EVICTED, batch + np.uint64(number * 100_000))
        kept = np.concatenate(trail_in(tmp_path))
        assert TRAIL_NBYTES < kept.nbytes <= TRAIL_NBYTES + batch.nbytes
        assert kept[-1] == 1_499_999
        assert (np.diff(kept) == 1).all()

    def test_more_than_it_holds_at_once_is_cut(
        self, database: IndexDatabase, tmp_path: Path
    ) -> None:
        database.note_departures(Reason.RESET, np.arange(2_000_000, dtype=np.uint64))
        (kept,) = trail_in(tmp_path)
        assert (kept.nbytes <= TRAIL_NBYTES, kept[-1]) == (True, 1_999_999)
        database.note_departures(Reason.EVICTED, mark_keys(KEYS[:1]))
        assert [len(row) for row in trail_in(tmp_path)] == [len(kept), 1]
        database.note_departures(Reason.EVICTED, kept)
        assert [len(row) for row in trail_in(tmp_path)] == [len(kept)]

    def test_a_chunk_written_again_in_its_place_has_not_left(self, store: Store) -> None:
        store.filled()
        store.start()
        store.fill()
        store.stop()
        assert store.sql("SELECT * FROM departures") == []

    def test_one_commit_has_one_row_per_reason(self, store: Store) -> None:
        store.start()
        store.fill()
        # The first note goes at once; what follows within the second goes together at the end.
        store.put(KEYS[SLOTS : SLOTS + 4], range(4))
        store.put(KEYS[SLOTS + 4 : SLOTS + 8], range(4, 8))
        store.tier.forget([9, 10])
        store.stop()
        rows = store.sql("SELECT reason, length(key_hashes) / 8 FROM departures ORDER BY end")
        left = {
            reason: sum(n for what, n in rows if what == reason)
            for reason in ("evicted", "corrupt")
        }
        assert left == {"evicted": 8, "corrupt": 2}
        assert len(rows) <= 5


class TestLog:
    def test_it_is_cut_when_nobody_needs_it_any_more(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(index, "_LONGEST_LOG_NBYTES", 1 << 16)
        spec = IndexSpec(tmp_path / "index.sqlite", "process")
        database = IndexDatabase.open(spec, BlockIo())
        reader = sqlite3.connect(spec.path, isolation_level=None)
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
        spec = IndexSpec(tmp_path / "index.sqlite", "process")
        database = IndexDatabase.open(spec, BlockIo())

        def fail(path: Path) -> None:
            raise OSError(errno.EIO, "Input/output error", str(path))

        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", fail)
            assert database.log_nbytes == 0
        database.close()

    async def test_one_that_grows_and_grows_is_reported_once(
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


def test_what_is_owed_to_be_cleared_goes_before_the_next_change(
    database: IndexDatabase,
) -> None:
    database.apply(Change(rows=rows_of([0, 1])))
    database.owe_clear()
    database.apply(Change(rows=rows_of([1, 2])))
    assert not database.owes_clear
    assert sorted(database.load(SLOTS).slots.tolist()) == [1, 2]


def test_its_room_is_enough_for_keys_with_an_adapter_in_any_order(tmp_path: Path) -> None:
    chance, slots = random.Random(7), 20_000
    runs = [range(first, min(first + 64, slots)) for first in range(0, slots, 64)]
    chance.shuffle(runs)
    spec = IndexSpec(tmp_path / "index.sqlite", "process")
    database = IndexDatabase.open(spec, BlockIo())
    for late, run in enumerate(runs, start=10**9):
        keys = {slot: chance.randbytes(32 + ADAPTER_NBYTES + GROUP_NBYTES) for slot in run}
        rows = {
            slot: (slot, key, chance.getrandbits(62), late, late) for slot, key in keys.items()
        }
        database.apply(Change(rows={**rows}))
    database.close()
    assert spec.path.stat().st_size <= slots * index._ROW_NBYTES


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
                    tasks.create_task(group.clear(doubt=True))
                else:
                    tasks.create_task(group.put([int(what)], [KEYS[int(what)]], [7]))
                await asyncio.sleep(0)  # until it waits
            database.gate.set()
        await stopped(group)
        return database.changes[1]

    async def test_a_reset_takes_along_the_rows_that_came_before_it(self) -> None:
        change = await self.after_the_first([9], "0", "reset", "1")
        assert (change.clear, change.doubt, list(change.rows)) == (True, True, [1])

    async def test_what_could_not_be_deleted_is_tried_again_unless_it_was_replaced(
        self,
    ) -> None:
        change = await self.after_the_first([0, 5], "0", fails=True)
        assert change.rows.keys() == {0, 5}
        assert change.rows[0] is not None
        assert change.rows[5] is None

    async def test_a_reset_that_waits_is_not_undone_by_a_commit_that_fails(self) -> None:
        change = await self.after_the_first([5], "reset", "1", fails=True)
        assert (change.clear, change.doubt, list(change.rows)) == (True, True, [1])


class TestGroupCommit:
    @pytest.fixture
    def database(self) -> Recorder:
        return Recorder()

    @pytest.fixture
    async def group(self, database: Recorder, monkeypatch: pytest.MonkeyPatch) -> GroupCommit:
        """A group whose next notes are due in an hour, as it has just been told of some."""
        monkeypatch.setattr(group_commit, "_NOTES_INTERVAL_S", 3600.0)
        group = GroupCommit(database, name="test", clock=1)
        group.depart_nowait(Reason.EVICTED, mark_keys(KEYS[:1]))  # the first goes at once
        return group

    async def test_notes_wait_for_their_second_and_rows_do_not(
        self, database: Recorder, group: GroupCommit
    ) -> None:
        await group.put([0], [KEYS[0]], [7])
        group.use_nowait([0])
        group.depart_nowait(Reason.EVICTED, mark_keys(KEYS[1:2]))
        await group.put([1], [KEYS[1]], [7])
        assert not database.changes[-1].notes
        await stopped(group)
        last = database.changes[-1].notes
        assert (dict(last.hits), list(last.departures)) == ({0: 1}, [Reason.EVICTED])

    async def test_a_use_of_a_chunk_that_left_is_dropped(
        self, database: Recorder, group: GroupCommit
    ) -> None:
        await group.put([0, 1, 2], KEYS[:3], [7, 7, 7])
        group.use_nowait([0, 1, 2])
        await group.put([0], [KEYS[3]], [7])
        group.delete_nowait([1])
        group.use_nowait([0])
        await stopped(group)
        assert database.changes[-1].notes.hits == {0: 1, 2: 1}
